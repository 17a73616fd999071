"""Intel Extension for PyTorch 2.8, the retired one, on CPU tensors: `varlen_attention` and `PagedAttention`.

They answer as the release's CPU functions do, which run for real in `ipex_for_real.py`; of its XPU functions no more is
known than that they forward their arguments. What is undefined there is lint.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections import Counter
from itertools import pairwise
from typing import Any

import torch

from tests.emulators.cuda.numerics import attend, band
from tests.emulators.xpu.stack import lint, require

VERSIONS = {"intel-extension-for-pytorch": "2.8.10+xpu"}
#: "varlen", "paged" -> calls.
counts: Counter[str] = Counter()
Tensor = torch.Tensor
NAN = float("nan")


def install() -> None:
    """Puts the package into sys.modules; once a process, for good."""
    names = ("", ".llm", ".llm.functional", ".llm.modules")
    package, llm, functional, modules = (_module(f"intel_extension_for_pytorch{name}") for name in names)
    package.__version__ = VERSIONS["intel-extension-for-pytorch"]
    package.llm, llm.functional, llm.modules = llm, functional, modules
    functional.varlen_attention = varlen_attention
    modules.PagedAttention = PagedAttention
    modules.VarlenAttention = types.SimpleNamespace(apply_function=varlen_attention)


def _module(name: str) -> Any:
    module = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
    sys.modules[name] = module
    return module


@torch.no_grad()
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    gen_: Any,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = -1.0,
) -> Tensor:
    """q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv] -> out, which is written and returned; seqlen_* are boundaries.

    The scale is D**-0.5 whatever is asked, dropout is none. Causal is aligned to the first row, and with it the mask of
    each document's length falls away: later rows of a document with fewer keys see the zeros that pad it.
    """
    assert alibi_slopes is None, "alibi_slopes is not supported"
    assert not zero_tensors, "zero_tensors is not supported"
    assert not return_softmax, "return_softmax is not supported"
    assert window_size_left == -1 == window_size_right, "windows are not supported"
    assert softcap == -1.0, "softcap is not supported"
    require(query.dtype == key.dtype == value.dtype, "expected all of one dtype")
    scale = query.shape[-1] ** -0.5
    lint(abs(softmax_scale - scale) <= 1e-6 * scale, f"softmax_scale {softmax_scale} is ignored, it is {scale}")
    lint(pdropout == 0.0, f"dropout {pdropout} is ignored")
    ends_q, ends_k = seqlen_q.tolist(), seqlen_k.tolist()
    require(ends_q[-1] == query.shape[0], f"shape mismatch: {query.shape[0]} rows, boundaries end at {ends_q[-1]}")
    require(ends_k[-1] == key.shape[0], f"shape mismatch: {key.shape[0]} rows, boundaries end at {ends_k[-1]}")
    counts["varlen"] += 1
    longest = max(b - a for a, b in pairwise(ends_k))
    for index in range(len(ends_q) - 1):
        rows = slice(ends_q[index], ends_q[index + 1])
        keys = slice(ends_k[index], ends_k[index + 1])
        out[rows] = _document(query[rows], key[keys], value[keys], is_causal, scale, longest).to(out.dtype)
    return out


def _document(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, longest: int) -> Tensor:
    if not causal:
        return attend(q, k, v, torch.ones(q.shape[0], k.shape[0], dtype=torch.bool), scale=scale)[0]
    k, v = (torch.cat([t, t.new_zeros(longest - t.shape[0], *t.shape[1:])]) for t in (k, v))
    seen = torch.ones(q.shape[0], longest, dtype=torch.bool).tril()
    return attend(q, k, v, seen, scale=scale)[0]


class PagedAttention:
    """Pages [blocks, Hk, block, D], heads first. A cache of another layout corrupts the heap without a check."""

    @classmethod
    def reshape_and_cache(
        cls, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
        kv_cache_dtype: str = "auto", k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Writes rows [T,Hk,D] at slots; a negative one is left out."""
        _heads_first(key_cache, key.shape[1])
        size = key_cache.shape[2]
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                key_cache[slot // size, :, slot % size] = key[row]
                value_cache[slot // size, :, slot % size] = value[row]

    @classmethod
    @torch.no_grad()
    def flash_attn_varlen_func(
        cls, output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor, max_seqlen_q: int, max_seqlen_kv: int, scale: float, is_cusal: bool,
        block_tables: Tensor, alibi_slopes: Tensor | None, window_size_left: int = -1, window_size_right: int = -1,
        kv_cache_dtype: str = "auto", k_scale: float = 1.0, v_scale: float = 1.0, softcap: float = -1.0,
    ) -> Tensor:  # fmt: skip
        """Causal from the bottom right; scale, windows and softcap are heeded; a row that sees nothing is NaN.

        Rows of no document keep what `output` had.
        """
        require(alibi_slopes is None, "alibi is not supported")
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        counts["paged"] += 1
        for index in range(len(ends_q) - 1):
            rows, used = slice(ends_q[index], ends_q[index + 1]), ends_k[index + 1] - ends_k[index]
            size = key_cache.shape[2]
            pages = block_tables[index, : -(-used // size)].tolist()
            require(all(0 <= page < key_cache.shape[0] for page in pages), "(emulator) a page outside the pool")
            k, v = (cache[pages].transpose(1, 2).flatten(0, 1)[:used] for cache in (key_cache, value_cache))
            right = 0 if is_cusal else window_size_right
            seen = band(rows.stop - rows.start, used, window_size_left, right)
            out, lse = attend(query[rows], k, v, seen, scale=scale, softcap=max(softcap, 0.0))
            output[rows] = out.masked_fill(lse.isneginf().T[..., None], NAN).to(output.dtype)
        return output


def _heads_first(cache: Tensor, heads: int) -> None:
    require(cache.dim() == 4 and cache.shape[1] == heads, "(emulator) not [blocks, heads, block, D]: heap corruption")
