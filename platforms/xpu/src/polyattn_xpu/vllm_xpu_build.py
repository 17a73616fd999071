"""What vllm-xpu-kernels is compiled for, and the function of it that is called: facts, and one import."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

PACKAGE = "vllm-xpu-kernels"
#: The only releases whose compiled forms were read.
KNOWN = "0.1.16"
MODULE = "vllm_xpu_kernels.flash_attn_interface"
#: What the package's function is called with, by name: its order is vLLM's, not FlashAttention's.
_ARGUMENTS = frozenset(
    (
        "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k", "block_table",
        "softmax_scale", "causal", "return_softmax_lse", "out", "is_mix_batch",
    )
)  # fmt: skip

#: Compiled forms of the wheel 0.1.16.2, read from its libraries. What is not among them would run in the package's
#: PyTorch reference, which reads lengths on the host and holds all scores: it is never asked for.
HEAD_DIMS = frozenset({64, 80, 96, 128, 192, 256})
#: Causal, LSE -> head dims without pages.
COMPILED = {
    (False, False): frozenset({64, 80, 96, 128, 256}),
    (False, True): frozenset({128, 192, 256}),
    (True, False): frozenset({64, 128, 192, 256}),
    (True, True): frozenset({128, 192, 256}),
}
PAGED = frozenset({64, 128})
PAGED_CAUSAL = frozenset({64, 128, 192, 256})  # and 96 and 512, which have no causal form without pages
#: Over pages: the most query heads that share a KV head, and keys that a step reads -> head dims.
DECODE = {
    (8, 16): frozenset({64, 128}),
    (8, 32): frozenset({128, 512}),
    (8, 64): frozenset({64, 96, 128, 192, 256, 512}),
    (16, 16): frozenset({64, 128}),
    (16, 32): frozenset({64}),
    (16, 64): frozenset({64, 128, 256}),
}
PAGE_SIZES = frozenset({16, 32, *range(64, 65537, 64)})
MOST_HEADS = 16

#: Xe families by the two numbers that begin an architecture: 12.60 and 12.61 are PVC, 20.x BMG and LNL, 30.x PTL, WCL.
_PVC = ((12, 60), (12, 61))
_XE2, _XE3 = 20, 30
#: The same by the names that people give them, as a machine that is described may have them.
NAMES = ("PVC", "BMG", "LNL", "PTL", "WCL")


def served(arch: str) -> bool:
    """Whether the wheel has kernels for an architecture, by SYCL's number or by name; an unknown one may have them."""
    try:
        number = int(arch or "0", 16)
    except ValueError:
        return arch.upper().startswith(NAMES)
    if number == 0:
        return True
    number = number >> 8 if number > 0xFFFFFFFF else number  # some releases of SYCL put a byte of zeros behind
    family = (number >> 22, number >> 14 & 0xFF)
    return family in _PVC or family[0] in (_XE2, _XE3)


def form(head_dim: int, causal: bool, need_lse: bool) -> tuple[int, bool]:
    """The head dim to pad to, and whether to ask for the LSE: the narrowest form that is compiled."""
    forms = (True,) if need_lse else (False, True)
    return min((min(w for w in COMPILED[causal, lse] if w >= head_dim), lse) for lse in forms)


def step(page_size: int) -> int:
    """Keys that its kernels take at once over pages: what lies behind a row's last key in them counts as 0 times it."""
    return min(page_size, 64)


def decodes(heads: int, head_dim: int, page_size: int) -> bool:
    """Whether rows of one query are compiled: `heads` query heads on a KV head, over pages of `page_size` rows."""
    packed = 8 if heads <= 8 else 16
    return heads <= MOST_HEADS and head_dim in DECODE[packed, step(page_size)]


@lru_cache(maxsize=1)
def operator() -> Callable[..., Any]:
    """`flash_attn_varlen_func`, once it is known to have its kernels, without which it can be imported, and to fit."""
    module = importlib.import_module(MODULE)
    if not getattr(module, "FA2_AVAILABLE", True):
        why = getattr(module, "FA2_UNAVAILABLE_REASON", None) or "it does not say why"
        raise ImportError(f"{why}: its wheel loads beside one build of torch, that it was linked with")
    function: Callable[..., Any] = module.flash_attn_varlen_func
    lacking = sorted(_ARGUMENTS - set(inspect.signature(function).parameters))
    if lacking:
        raise RuntimeError(
            f"{PACKAGE}: flash_attn_varlen_func does not take {', '.join(lacking)}; "
            "install 0.1.16 or later, or choose another backend"
        )
    return function
