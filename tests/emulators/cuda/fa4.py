"""FlashAttention 4 (`flash_attn.cute` of flash-attn-4 4.0.0b36) on CPU tensors: functions as the wheel has them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tests.emulators.cuda.fa4_kernels import Attention, Lengths, Rule, Window, forward

VERSIONS = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}


def install() -> None:
    """Put `flash_attn` (a namespace, as that wheel leaves it), `flash_attn.cute` and its interface into sys.modules."""
    parent, cute, interface = (
        types.ModuleType(f"flash_attn{rest}", __doc__) for rest in ("", ".cute", ".cute.interface")
    )
    parent.__path__ = []
    cute.__path__ = []
    for module in (cute, interface):
        module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
        module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    interface._flash_attn_fwd = _flash_attn_fwd  # type: ignore[attr-defined]
    cute.interface, parent.cute = interface, cute  # type: ignore[attr-defined]
    cute.__version__ = "0.0.0"  # type: ignore[attr-defined]
    for module in (parent, cute, interface):
        sys.modules[module.__name__] = module


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[B,S,H,D] -> (out, lse [B,H,Sq] | None), always two."""
    _only_plain(qv, gather_kv_indices, learnable_sink, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
                block_sparse_tensors, block_sparse_tensors_bwd)  # fmt: skip
    rule = Rule(softmax_scale, causal, window_size, softcap, num_splits, Lengths(), return_lse)
    return Attention.apply(q, k, v, rule)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Packed [T,H,D] by boundaries, or [B,S,H,D] by used rows; k, v likewise, or pages [N,page,Hk,D] -> (out, lse)."""
    _only_plain(qv, gather_kv_indices, learnable_sink, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
                block_sparse_tensors, scheduler_metadata, seqlen_k_per_split)  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, max_seqlen_q)
    rule = Rule(softmax_scale, causal, window_size, softcap, num_splits, lengths, return_lse)
    return Attention.apply(q, k, v, rule)


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    *,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
    """The private forward: into `out` where it is given, five values back."""
    _only_plain(qv)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, max_seqlen_q)
    window = (window_size_left, window_size_right)
    rule = Rule(softmax_scale, causal, window, softcap or 0.0, num_splits, lengths, return_lse or lse is not None)
    with torch.no_grad():
        result, row_lse = forward(q, k, v, rule)
    if out is not None:
        assert out.shape == result.shape
        assert out.dtype == result.dtype
        assert out.stride(-1) == 1
        assert out.data_ptr() % 16 == 0
        result = out.copy_(result)
    if lse is not None and row_lse is not None:
        row_lse = lse.copy_(row_lse)
    return result, row_lse, None, None, None


def _only_plain(*features: object) -> None:
    if any(feature is not None for feature in features):
        raise NotImplementedError("qv, sinks, mods and block sparsity are not emulated")
