"""The kernels that polyattn is compared with, each called as its own library offers it; a missing one says why."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from _record import Record
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Call = Callable[[], Any]

#: Arguments of FA3's raw forward in order, with what they are when not stated; checked against the op's schema.
_FA3 = {
    "q": None, "k": None, "v": None, "k_new": None, "v_new": None, "q_v": None, "out": None, "cu_seqlens_q": None,
    "cu_seqlens_k": None, "cu_seqlens_k_new": None, "seqused_q": None, "seqused_k": None, "max_seqlen_q": None,
    "max_seqlen_k": None, "page_table": None, "kv_batch_idx": None, "leftpad_k": None, "rotary_cos": None,
    "rotary_sin": None, "seqlens_rotary": None, "q_descale": None, "k_descale": None, "v_descale": None,
    "softmax_scale": None, "is_causal": False, "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0,
    "softcap": 0.0, "is_rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 1, "pack_gqa": None,
    "sm_margin": 0,
}  # fmt: skip
_FA3_BUILDS = (("fa3_fwd._C", "fa3_fwd"), ("flash_attn_3._C", "flash_attn_3"))


class MissingPeer(Exception):
    """It is not installed here; its text says what is."""


def offered(record: Record, makers: Mapping[str, Callable[[], Call]]) -> dict[str, Call]:
    """The calls that can be made here, each tried once; why the others cannot is kept in the record."""
    calls = {}
    for name, make in makers.items():
        try:
            call = make()
            call()
            calls[name] = call
        except Exception as error:  # a peer that is missing or that refuses is told, and the others are compared
            record.missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return calls


def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **stated: Any) -> Call:
    """FlashAttention-3's raw op; `stated` are further arguments of it by name."""
    op = _fa3_op()
    unknown = set(stated) - set(_FA3)
    if unknown:
        raise TypeError(f"fa3: unknown arguments {sorted(unknown)}")
    values = {**_FA3, "softmax_scale": q.shape[-1] ** -0.5, **stated, "q": q, "k": k, "v": v}
    arguments = tuple(values.values())
    return lambda: op(*arguments)


def fa3_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, **stated: Any
) -> Call:
    """The same on packed rows [T,H,D] with one set of boundaries."""
    return fa3(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, **stated)


def fa3_wrapper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """FlashAttention-3's own Python function."""
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        try:
            function = importlib.import_module(name).flash_attn_func
        except ImportError:
            continue
        return lambda: function(q, k, v)
    raise MissingPeer("neither fa3_fwd_interface nor flash_attn_interface is installed")


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend | None = None, mask: Any = None
) -> Call:
    """torch's SDPA on [B,S,H,D], by one of its backends or as it chooses."""
    turned = [tensor.transpose(1, 2) for tensor in (q, k, v)]

    def plain() -> Any:
        return scaled_dot_product_attention(*turned, attn_mask=mask)

    def pinned() -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*turned, attn_mask=mask)

    return plain if backend is None else pinned


def torch_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int) -> Call:
    """torch.nn.attention.varlen on packed rows."""
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return lambda: function(q, k, v, cu, cu, longest, longest)


def flex_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> Call:
    """Compiled flex_attention with a block mask of documents, on packed rows."""
    if q.device.type == "cpu":
        raise MissingPeer("flex_attention is compared on an accelerator only")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return document[i] == document[j]

    rows = q.shape[0]
    blocks = flex.create_block_mask(same, None, None, rows, rows, device=q.device)
    turned = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(*turned, block_mask=blocks)


def _fa3_op() -> Any:
    for extension, namespace in _FA3_BUILDS:
        try:
            importlib.import_module(extension)
        except ImportError:
            continue
        op = getattr(torch.ops, namespace).fwd.default
        names = [argument.name for argument in op._schema.arguments]
        if names != list(_FA3):
            raise MissingPeer(f"{namespace}.fwd has another schema than the one known: {names}")
        return op
    raise MissingPeer("no FlashAttention-3 build is installed")
