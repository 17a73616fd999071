"""The maker's attention kernel, with habits of its own, as every maker's has."""

from __future__ import annotations

import math

import torch

from toychip_runtime.device import ToyTensor, lift

HEAD_DIMS = range(16, 129, 16)
DTYPES = (torch.float32, torch.bfloat16)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents side by side: query [T,H,D], key and value [Tk,H,D]; document n has rows starts[n] to starts[n+1].

    Returns the output [T,H,D] and, float32, the base-2 logarithm of the sum of weights [T,H]. Causal counts from the
    end of each document. A row that sees no key is NaN; rows past the last document are not written.
    """
    if any(type(tensor) is not ToyTensor for tensor in (query, key, value, starts_q, starts_k)):
        raise RuntimeError("toychip: attend() takes tensors of the device toychip alone")
    if query.dtype not in DTYPES or query.shape[-1] not in HEAD_DIMS or key.shape[1:] != query.shape[1:]:
        raise RuntimeError(f"toychip: no program for {query.dtype}, query {query.shape}, key {key.shape}")
    if not all(tensor.is_contiguous() for tensor in (query, key, value)):
        raise RuntimeError("toychip: rows must be contiguous")
    q, k, v = query.raw.float(), key.raw.float(), value.raw.float()
    out = torch.full_like(query.raw, float("nan"))
    log2 = torch.full(q.shape[:2], float("nan"))
    bounds_q, bounds_k = starts_q.raw.tolist(), starts_k.raw.tolist()
    for n in range(len(bounds_q) - 1):
        rows, keys = slice(*bounds_q[n : n + 2]), slice(*bounds_k[n : n + 2])
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[keys]) * softmax_scale
        if causal:
            queries, seen = scores.shape[1:]
            ahead = torch.ones(queries, seen, dtype=torch.bool).triu(seen - queries + 1)
            scores = scores.masked_fill(ahead, float("-inf"))
        out[rows] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[keys]).to(out.dtype)
        log2[rows] = (scores.logsumexp(-1) / math.log(2.0)).T
    return lift(out), lift(log2)
