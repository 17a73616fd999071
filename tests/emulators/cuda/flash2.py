"""FlashAttention 2's rules, which its own extension and torch's flash ops share: limits, empty rows, what is unwritten.

From the knowledge of FA2 2.8.3; where hardware would read or write outside a tensor, or hang, this raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tests.emulators.cuda.numerics import attend, band, gradients

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Scores:
    """How scores are made and hidden; window sides below 0 are unbounded."""

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float

    def within(self, max_q: int, max_k: int) -> Scores:
        """As the kernel's host code rewrites them: by the stated longest documents."""
        left = -1 if self.left >= max_k else self.left
        right = -1 if self.right >= max_k else self.right
        causal = self.causal and max_q != 1
        right = 0 if causal else right
        if left >= 0 > right:
            right = max_k
        return Scores(self.scale, causal, left, right, self.softcap)

    @property
    def broken(self) -> bool:
        """Hidden scores are -inf before they are scaled, which makes NaN of them unless the scale is positive."""
        return self.scale <= 0.0 and not self.softcap


class Document(NamedTuple):
    """Rows [q0,q1) of queries, the keys and values they have, and where those keys lie (None: not in rows)."""

    q0: int
    q1: int
    k: torch.Tensor
    v: torch.Tensor
    rows: slice | None


def check(condition: bool, text: str) -> None:
    """A TORCH_CHECK of the extension."""
    if not condition:
        raise RuntimeError(text)


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """What every entry checks of q, k, v."""
    check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(q.shape[-1] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check(k.shape[-1] == q.shape[-1] == v.shape[-1], "k, v must have q's head_size")
    check(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(k.shape[:-1] == v.shape[:-1], "k and v must have one shape")


def check_boundaries(name: str, cu: torch.Tensor, rows: int | None) -> list[int]:
    """Boundaries as numbers; they must be int32, contiguous, ascending, inside the tensor."""
    check(cu.dtype == torch.int32, f"{name} must have dtype int32")
    check(cu.is_contiguous(), f"{name} must be contiguous")
    check(cu.dim() == 1 and cu.numel() >= 2, f"{name}: batch size must be positive")
    values: list[int] = cu.tolist()
    check(values == sorted(values) and values[0] == 0, f"{name}: not ascending from 0, which reads outside")
    check(rows is None or values[-1] <= rows, f"{name}: ends at {values[-1]} of {rows} rows, which reads outside")
    return values


def documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    *,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> list[Document]:
    """The documents of packed q [T,H,D] and k, v [Tk,Hk,D], or pages [N,page,Hk,D] under a block table."""
    check_tensors(q, k, v)
    check(q.dim() == 3 and q.shape[0] > 0, "an empty grid cannot be launched: total_q is 0")
    bounds_q = check_boundaries("cu_seqlens_q", cu_q, q.shape[0])
    bounds_k = check_boundaries("cu_seqlens_k", cu_k, None if block_table is not None else k.shape[0])
    check(len(bounds_q) == len(bounds_k), "cu_seqlens_k must have shape (batch_size + 1)")
    if max_q == 1 and q.shape[1] != k.shape[-2]:
        check(q.shape[0] == len(bounds_q) - 1, "reshape of q to (batch_size, ...) fails: total_q is not batch_size")
    used = None if seqused_k is None else _lengths(seqused_k, len(bounds_q) - 1)
    return list(_documents(q, k, v, bounds_q, bounds_k, used, block_table))


def _lengths(seqused_k: torch.Tensor, batch: int) -> list[int]:
    check(seqused_k.dtype == torch.int32, "seqused_k must have dtype int32")
    check(seqused_k.is_contiguous() and tuple(seqused_k.shape) == (batch,), "seqused_k must have shape (batch_size)")
    values: list[int] = seqused_k.tolist()
    return values


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds_q: list[int],
    bounds_k: list[int],
    used: list[int] | None,
    block_table: torch.Tensor | None,
) -> Iterator[Document]:
    if block_table is not None:
        check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        check(k.dim() == 4 and k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    for index in range(len(bounds_q) - 1):
        start = bounds_k[index]
        keys = bounds_k[index + 1] - start if used is None else used[index]
        rows = slice(start, start + keys)
        if block_table is None:
            yield Document(bounds_q[index], bounds_q[index + 1], k[rows], v[rows], rows)
            continue
        pages = block_table[index, : -(-keys // k.shape[1])].tolist()
        check(all(0 <= page < k.shape[0] for page in pages), "block_table: a page outside the pool is read")
        one, other = (pool[pages].flatten(0, 1)[:keys] for pool in (k, v))
        yield Document(bounds_q[index], bounds_q[index + 1], one, other, None)


def forward(
    q: torch.Tensor,
    parts: list[Document],
    scores: Scores,
    max_q: int,
    max_k: int,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T,H,D], lse [H,T]: NaN where nothing is written, 0 and +inf on rows that see nothing."""
    scores = scores.within(max_q, max_k)
    out = torch.empty_like(q) if out is None else out
    out.fill_(NAN)  # what was there is no answer
    lse = torch.full((q.shape[1], q.shape[0]), NAN, dtype=torch.float32)
    if max_k == 0:
        return out.zero_(), lse.fill_(INF)
    for part in parts:
        stop = min(part.q1, part.q0 + max_q)  # tiles past the stated longest document are never launched
        rows = slice(part.q0, stop)
        seen = band(part.q1 - part.q0, part.k.shape[0], scores.left, scores.right)[: stop - part.q0]
        result, row_lse = attend(q[rows], part.k, part.v, seen, scale=scores.scale, softcap=scores.softcap)
        out[rows] = result.to(q.dtype) if not scores.broken else NAN
        lse[:, rows] = row_lse.masked_fill(row_lse.isneginf(), INF).float()
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: list[Document],
    scores: Scores,
    max_q: int,
    max_k: int,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Writes the gradients of packed q, k, v; rows of no document stay unwritten (NaN). An LSE's has no way in."""
    check(dout.dtype == q.dtype and dout.stride(-1) == 1, "dout must have q's dtype and a contiguous last dimension")
    scores = scores.within(max_q, max_k)
    for grad in grads:
        grad.fill_(NAN)
    for part in parts:
        check(part.rows is not None, "backward of a paged forward does not exist")
        rows, keys = slice(part.q0, part.q1), part.rows
        seen = band(part.q1 - part.q0, part.k.shape[0], scores.left, scores.right)
        found = gradients(
            dout[rows], q[rows], part.k, part.v, seen, scale=scores.scale, softcap=scores.softcap
        )  # fmt: skip
        for grad, place, value in zip(grads, (rows, keys, keys), found, strict=True):
            grad[place] = value.to(q.dtype) if not scores.broken else NAN
