"""`mate` and its FlashAttention-3 wrapper (`flash_attn_interface`) as Python modules, on tensors that pass for MUSA's.

The real packages are on no index, so that their Python surface is emulated as well: signatures, what is asserted, which
kernel is taken. A tensor's `is_musa` is true of every tensor of the process once this is installed.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

from tests.emulators.cuda.numerics import band, gradients
from tests.emulators.musa import mate_kernels
from tests.emulators.musa.mate_kernels import Lengths, Scores, check, check_call
from tests.emulators.musa.stack import VERSIONS as RELEASES
from tests.emulators.musa.stack import current, lint, require

VERSIONS = {name: RELEASES[name] for name in ("torch_musa", "mate", "flash_attn_3")}
Tensor = torch.Tensor


def install() -> None:
    """Puts the modules into sys.modules; once a process, for good."""
    torch.Tensor.is_musa = property(lambda tensor: True)
    names = ("mate", "mate.mha_interface", "flash_attn_3", "flash_attn_3.interface", "flash_attn_interface")
    mate, interface, package, wrapped, public = (_module(name) for name in names)
    mate.__version__, package.__version__ = VERSIONS["mate"], VERSIONS["flash_attn_3"]
    mate.mha_interface, package.interface = interface, wrapped
    interface.flash_attn_varlen_func = mate.flash_attn_varlen_func = mate_varlen
    for module in (wrapped, public):
        module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        function.__module__ = "flash_attn_3.interface"


def _module(name: str) -> Any:
    module = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
    sys.modules[name] = module
    return module


def mate_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Any = (-1, -1), learnable_sink: Tensor | None = None,
    attention_chunk: int | None = 0, softcap: float = 0.0, scheduler_metadata: Tensor | None = None,
    num_splits: int = 0, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0,
    return_softmax_lse: bool = False, backend: str = "auto", cp_world_size: int = 1, cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None, out: Tensor | None = None,
) -> Any:  # fmt: skip
    """`mate.mha_interface.flash_attn_varlen_func`."""
    require(current().libraries.mate, f"mate needs MUSA SDK 4.3.6, and this is {current().sdk}", ImportError)
    left, right = (-1, -1) if window_size is None else window_size
    left, right = (-1 if side is None else side for side in (left, right))
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table)
    beyond = (qv, q_descale, k_descale, v_descale, learnable_sink, scheduler_metadata, cp_tot_seqused_k)
    if any(given is not None for given in beyond) or attention_chunk or cp_world_size != 1:
        raise NotImplementedError("(emulator) qv, descales, sinks, chunks, metadata and context parallelism")
    plain = softcap == 0.0 and left < 0 and right <= 0 and all(t is None for t in (page_table, seqused_q, seqused_k))
    if _by_asm(q, k, v, lengths, plain):
        check(right < 0, "window_size_right is None or window_size_right < 0")  # its own choice let 0 pass
        check(all(t.stride(-1) == 1 for t in (q, k, v)), "must have contiguous last dimension")
        check(out is None or out.is_contiguous(), "out must be contiguous")
        mate_kernels.counts["asm"] += 1
    else:
        mate_kernels.counts["mutlass"] += 1
    check_call(q, k, v, lengths)
    check(out is None or (out.dtype == q.dtype and out.shape == (*q.shape[:-1], v.shape[-1])), "out does not fit")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = _resolved(q, k, lengths, Scores(scale, causal, left, right, softcap))
    result, lse = _Attend.apply(q, k, v, lengths, scores, out)
    return (result, lse) if return_softmax_lse else result


def _by_asm(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, plain: bool) -> bool:
    """Whether the hand-written kernels take it; asked of packed queries without cu_seqlens_k, mate itself stumbles."""
    dims = (q.shape[-1], v.shape[-1])
    fits = dims == (192, 128) or dims[0] == dims[1] <= 128
    if not plain or not fits or not q.dim() == k.dim() == v.dim():
        return False
    if q.dim() == 4:
        return True
    if lengths.cu_q is None or lengths.cu_k is None:
        raise AttributeError("'NoneType' object has no attribute 'is_musa'")
    return lengths.cu_q.numel() == lengths.cu_k.numel() and lengths.max_q is not None and lengths.max_k is not None


def _resolved(q: Tensor, k: Tensor, lengths: Lengths, asked: Scores) -> Scores:
    """Windows by the longest of queries as stated, and by all rows of keys."""
    max_q = q.shape[1] if lengths.cu_q is None else lengths.max_q or 0
    all_k = k.shape[-3] if lengths.table is None else lengths.table.shape[1] * k.shape[1]
    left = -1 if asked.left >= all_k - 1 else asked.left
    right = 0 if asked.causal else -1 if asked.right >= max_q - 1 else asked.right
    causal = left < 0 and right == 0
    if left >= 0 > right:
        right = max_q - 1
    return Scores(asked.scale, causal, left, right, asked.softcap)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scores: Scores, out: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.lengths, ctx.scores = lengths, scores
        result, lse = mate_kernels.forward(q, k, v, lengths, scores, out)
        ctx.mark_non_differentiable(lse)
        return result, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Any) -> Any:
        """muDNN's, of packed documents alone; without a batch's boundaries mate stumbles."""
        q, k, v = ctx.saved_tensors
        if ctx.lengths.cu_q is None:
            raise TypeError("'NoneType' object is not subscriptable")
        require(q.shape[-1] <= 256, "FlashAttention backward only supports head dimension at most 256")
        require(q.shape[-1] % 8 == 0, "head_size should be a multiple of 8")
        require(ctx.scores.softcap == 0.0, "Softcapping does not support dropout for now")
        lint(ctx.scores.left < 0 and ctx.scores.right <= 0, "gradients of a window: no source says that they heed it")
        grads = tuple(torch.full_like(t, float("nan")) for t in (q, k, v))
        starts = ctx.lengths.cu_k.tolist()
        for index, part in enumerate(mate_kernels.documents(q, k, v, ctx.lengths)):
            seen = band(part.rows.stop - part.rows.start, part.k.shape[0], -1, 0 if ctx.scores.causal else -1)
            found = gradients(dout[part.rows], q[part.rows], part.k, part.v, seen, scale=ctx.scores.scale)
            keys = slice(starts[index], starts[index + 1])
            for grad, place, value in zip(grads, (part.rows, keys, keys), found, strict=True):
                grad[place] = value.to(q.dtype)
        return (*grads, None, None, None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 0, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False, return_softmax_lse: bool = False, sinks: Tensor | None = None,
    s_aux: Tensor | None = None, cp_world_size: int = 1, cp_rank: int = 0, cp_tot_seqused_k: Tensor | None = None,
) -> Any:  # fmt: skip
    """The wrapper's dense function: out, or (out, lse)."""
    return mate_varlen(
        q, k, v, softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, learnable_sink=s_aux if sinks is None else sinks,
        attention_chunk=attention_chunk, softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa,
        deterministic=deterministic, return_softmax_lse=return_attn_probs or return_softmax_lse,
        cp_world_size=cp_world_size, cp_rank=cp_rank, cp_tot_seqused_k=cp_tot_seqused_k,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: Any = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False, return_softmax_lse: bool = False,
    sinks: Tensor | None = None, s_aux: Tensor | None = None, cp_world_size: int = 1, cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None, out: Tensor | None = None,
) -> Any:  # fmt: skip
    """The wrapper's varlen function: page_table or block_table, probs or LSE, sinks or s_aux."""
    return mate_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        block_table if page_table is None else page_table, softmax_scale, causal, qv, q_descale, k_descale, v_descale,
        window_size, s_aux if sinks is None else sinks, attention_chunk, softcap, scheduler_metadata, num_splits,
        pack_gqa, deterministic, sm_margin, return_attn_probs or return_softmax_lse, "auto", cp_world_size, cp_rank,
        cp_tot_seqused_k, out,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
    cache_seqlens: Tensor | int | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, num_splits: int = 0, return_softmax_lse: bool = False,
    **more: Any,
) -> Any:  # fmt: skip
    """The wrapper's cache function, without appending and rotary."""
    if k is not None or v is not None or any(value is not None for value in more.values()):
        raise NotImplementedError(f"(emulator) appending and {', '.join(more)}")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((k_cache.shape[0],), cache_seqlens, dtype=torch.int32)
    return mate_varlen(
        q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, seqused_k=cache_seqlens,
        page_table=page_table, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        num_splits=num_splits, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
