"""`polyattn_cuda.repair` by plain formulas, in the place of its Triton kernels, which take no CPU tensor."""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.emulators.cuda.numerics import attend, band

Scoring = tuple[bool, float, "tuple[int | None, int | None] | None", float]


@torch.no_grad()
def repair_samples(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    *,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor,
    reach: int,
) -> None:
    """In place: samples of out [B,Sq,H,Dv] and lse [B,H,Sq] with strange values behind their used_k[b] keys."""
    for sample, keys in enumerate(used_k.tolist()):
        if v[sample, keys : keys + reach].isfinite().all():
            continue
        rows = q.shape[1] if used_q is None else int(used_q[sample])
        result, row_lse = _anew(q[sample, :rows], k[sample, :keys], v[sample, :keys], scoring)
        out[sample, :rows] = result.to(out.dtype)
        if lse is not None:
            lse[sample, :, :rows] = row_lse.float()


@torch.no_grad()
def repair_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    reach: int,
) -> None:
    """In place: documents of out [T,H,Dv] and lse [H,T] with strange values behind their last key."""
    for (start, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        if v[last : last + reach].isfinite().all():
            continue
        result, row_lse = _anew(q[start:end], k[first:last], v[first:last], scoring)
        out[start:end] = result.to(out.dtype)
        if lse is not None:
            lse[:, start:end] = row_lse.float()


def _anew(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    causal, scale, window, softcap = scoring
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    seen = band(q.shape[0], k.shape[0], -1 if left is None else left, -1 if right is None else right)
    return attend(q, k, v, seen, scale=scale, softcap=softcap)
