"""aiter's mha_batch_prefill_func, attention over paged keys through a list of pages, and its functions for float8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.emulators.cuda.flash2 import Document, Scores, check, check_boundaries
from tests.emulators.rocm import ck, stack


@torch.no_grad()
def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    logits_soft_cap: float,
    causal: bool,
    window_size: Sequence[int],
    return_lse: bool,
    out: torch.Tensor | None,
    kv_last_page_lens: torch.Tensor | None = None,
) -> Any:
    """q [T,H,D] over rows [N,Hk,D] or pages [N,page,Hk,D] -> out [T,H,Dv], and lse [H,T] where asked.

    Document i has the pages kv_page_indices[kv_indptr[i]:kv_indptr[i+1]], all full but the last.
    """
    build = stack.now().build
    scale = float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale
    k4, v4 = (t.unsqueeze(1) if t.dim() == 3 else t for t in (k, v))
    if k.dim() == 4 and max(build.prefill_pages) == 1:
        raise RuntimeError("k must have shape (num_blocks, num_heads_k, head_size_q)")
    check(k4.dim() == 4 and k4.shape[1] in build.prefill_pages, f"no batch prefill kernel for pages of {k4.shape[1]}")
    width = v.shape[-1]
    if max(build.prefill_pages) == 1:
        q, k4, v4 = (torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k4, v4))
    elif q.shape[-1] % 8 or width % 8:
        raise ValueError("Batch prefill requires head size divisible by vector size")
    ck.check_tensors(q, k4, v4)
    check(
        max(q.shape[-1], v4.shape[-1]) <= build.prefill_head_dim and stack.now().chip.aiter_ck,
        "invalid argument for fmha_batch_prefill",
    )
    parts = _documents(q, k4, v4, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, kv_last_page_lens)
    written = torch.empty(*q.shape[:-1], v4.shape[-1], dtype=q.dtype)
    scores = Scores(scale, causal, int(window_size[0]), int(window_size[1]), logits_soft_cap)
    lse = ck.forward(q, parts, scores, max_seqlen_q, max_seqlen_k, written)
    result = written if out is None else out.copy_(written)
    return (result[..., :width], lse) if return_lse else result[..., :width]


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    max_q: int,
    last: torch.Tensor | None,
) -> list[Document]:
    check(q.shape[0] > 0 and max_q > 0, "an empty grid cannot be launched: no query")
    bounds_q, bounds = check_boundaries("cu_seqlens_q", cu_q, q.shape[0]), check_boundaries("kv_indptr", indptr, None)
    check(len(bounds) == len(bounds_q), "kv_indptr must have shape (batch_size + 1)")
    check(indices.dtype == torch.int32, "kv_page_indices must have dtype torch.int32")
    check(bounds[-1] <= indices.numel(), "kv_page_indices: entries past its end are read")
    size = k.shape[1]
    check(size == 1 or last is not None, "pages of several rows without kv_last_page_lens are not emulated")
    parts = []
    for i in range(len(bounds) - 1):
        pages = bounds[i + 1] - bounds[i]
        keys = pages * size if last is None or not pages else (pages - 1) * size + int(last[i])
        one, other = ck.paged_rows(k, v, indices[bounds[i] : bounds[i + 1]], keys)
        parts.append(Document(bounds_q[i], bounds_q[i + 1], one, other, None))
    return parts


def float8_type() -> torch.dtype:
    """The float8 of the chip."""
    return torch.float8_e4m3fn if stack.now().arch == "gfx950" else torch.float8_e4m3fnuz


@torch.no_grad()
def float8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    window_size: Sequence[int],
    softmax_scale: float | None,
    descales: Sequence[torch.Tensor | None] = (None, None, None),
    softcap: float = 0.0,
    bounds: tuple[torch.Tensor, torch.Tensor, int, int] | None = None,
) -> torch.Tensor:
    """The bfloat16 answer of float8 q, k, v, [B,S,H,D] or packed under `bounds`; a descale is one float32."""
    check(stack.now().chip.aiter_asm, f"no float8 kernel for {stack.now().arch}")
    ck.check_tensors(q, k, v, (float8_type(),))
    check(all(d is None or (d.dtype == torch.float32 and d.numel() == 1) for d in descales), "descale: one float32")
    by_q, by_k, by_v = (1.0 if d is None else float(d) for d in descales)
    scale = float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale
    if bounds is None:
        flat, parts, max_q, max_k = q.flatten(0, 1), ck.samples(q, k, v), q.shape[1], k.shape[1]
    else:
        cu_q, cu_k, max_q, max_k = bounds
        flat, parts = q, ck.documents(q, k, v, cu_q, cu_k, max_q)
    written = torch.empty(*flat.shape[:-1], v.shape[-1], dtype=torch.float64)
    scores = Scores(scale * by_q * by_k, causal, int(window_size[0]), int(window_size[1]), softcap)
    ck.forward(flat, parts, scores, max_q, max_k, written)
    return (written * by_v).to(torch.bfloat16).view(*q.shape[:-1], v.shape[-1])
