"""AMD's Composable Kernel attention, under flash_attn's extension and aiter: limits, empty rows, what is unwritten.

Read in the kernels' sources: a row that sees nothing is 0 with LSE -inf; where the host says that no key exists at all,
the LSE is +inf. Where hardware would read outside a tensor, this raises.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.emulators.cuda.flash2 import Document, Scores, check, check_boundaries
from tests.emulators.cuda.numerics import attend, band, gradients

NAN, INF = float("nan"), float("inf")

#: Of paged keys, in flash_attn's extension and in aiter's flash_attn_varlen_func.
PAGE_MULTIPLE = 128
HALVES = (torch.float16, torch.bfloat16)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtypes: tuple[torch.dtype, ...] = HALVES) -> None:
    """What every entry checks of q, k, v; the width of v may differ."""
    check(q.dtype in dtypes, "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(max(q.shape[-1], v.shape[-1]) <= 256, "CK only supports head dimension at most 256")
    check(
        q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0,
        "query, key, value, and out_ must have a head_size that is a multiple of 8",
    )
    check(k.shape[-1] == q.shape[-1] and k.shape[:-1] == v.shape[:-1], "k and v must have shape (..., num_heads_k, d)")
    check(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def samples(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Document]:
    """The documents of dense q [B,Sq,H,D] and k, v [B,Sk,Hk,D]."""
    check(q.dim() == k.dim() == v.dim() == 4 and k.shape[0] == q.shape[0], "q, k, v must have shape (batch, ...)")
    check(q.shape[0] > 0, "batch size must be positive")
    check(q.shape[1] > 0, "an empty grid cannot be launched: seqlen_q is 0")
    queries, keys = q.shape[1], k.shape[1]
    return [
        Document(b * queries, (b + 1) * queries, k[b], v[b], slice(b * keys, (b + 1) * keys)) for b in range(q.shape[0])
    ]


def documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    block_table: torch.Tensor | None = None,
) -> list[Document]:
    """The documents of packed q [T,H,D] and k, v [Tk,Hk,D], or pages [N,page,Hk,D] under a block table."""
    check(q.dim() == 3 and q.shape[0] > 0 and max_q > 0, "an empty grid cannot be launched: no query")
    paged = block_table is not None
    check(k.dim() == v.dim() == (4 if paged else 3), "k and v must have the rank of rows, of pages with a block_table")
    bounds_q = check_boundaries("cu_seqlens_q", cu_q, q.shape[0])
    bounds_k = check_boundaries("cu_seqlens_k", cu_k, None if paged else k.shape[0])
    check(len(bounds_q) == len(bounds_k), "cu_seqlens_k must have shape (batch_size + 1)")
    if block_table is not None:
        _check_table(block_table, k, len(bounds_q) - 1)
    return list(_documents(k, v, bounds_q, bounds_k, block_table))


def _check_table(table: torch.Tensor, pool: torch.Tensor, batch: int) -> None:
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(table.dim() == 2 and table.shape[0] == batch, "block_table must have shape (batch_size, max_num_blocks)")
    check(pool.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 128")


def _documents(
    k: torch.Tensor, v: torch.Tensor, bounds_q: list[int], bounds_k: list[int], table: torch.Tensor | None
) -> Iterator[Document]:
    for index in range(len(bounds_q) - 1):
        rows = slice(bounds_k[index], bounds_k[index + 1])
        if table is None:
            yield Document(bounds_q[index], bounds_q[index + 1], k[rows], v[rows], rows)
            continue
        keys = rows.stop - rows.start
        check(keys <= table.shape[1] * k.shape[1], "block_table: more keys than the table has room for are read")
        one, other = paged_rows(k, v, table[index], keys)
        yield Document(bounds_q[index], bounds_q[index + 1], one, other, None)


def paged_rows(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `keys` rows under one row of a block table."""
    pages = table[: -(-keys // k.shape[1])].tolist()
    check(all(0 <= page < k.shape[0] for page in pages), "block_table: a page outside the pool is read")
    return k[pages].flatten(0, 1)[:keys], v[pages].flatten(0, 1)[:keys]


def forward(
    q: torch.Tensor,
    parts: list[Document],
    scores: Scores,
    max_q: int,
    max_k: int,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    above: int = 0,
) -> torch.Tensor:
    """Writes out [T,H,Dv] and returns the LSE [H,T]; NaN where nothing is written.

    bias is [Sq,Sk], the same for every sample. Documents of at most `above` queries are skipped.
    """
    scores = scores.within(max_q, max_k)
    out.fill_(NAN)  # what was there is no answer
    lse = torch.full((q.shape[1], q.shape[0]), NAN, dtype=torch.float32)
    if max_k == 0:
        out.zero_()
        return lse.fill_(INF)
    for part in parts:
        if above and part.q1 - part.q0 <= above:
            continue
        stop = min(part.q1, part.q0 + max_q)  # tiles past the stated longest document are never launched
        rows = slice(part.q0, stop)
        seen = band(part.q1 - part.q0, part.k.shape[0], scores.left, scores.right)[: stop - part.q0]
        result, row_lse = attend(
            q[rows], part.k, part.v, seen, scale=scores.scale, softcap=scores.softcap,
            bias=None if bias is None else bias[: stop - part.q0, : part.k.shape[0]],
        )  # fmt: skip
        out[rows] = result.to(out.dtype) if not scores.broken else NAN
        lse[:, rows] = row_lse.float() if not scores.broken else NAN
    return lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: list[Document],
    scores: Scores,
    max_q: int,
    max_k: int,
    *,
    deterministic: bool,
    bias: torch.Tensor | None = None,
) -> Tensors:
    """Gradients of packed q, k, v. An LSE's has no way in.

    Keys of a document without queries get no gradient: what the buffers held stays (Dao-AILab/flash-attention PR 2421).
    Without `deterministic`, dq is summed by atomics, in another order each time.
    """
    check(dout.dtype == q.dtype and dout.stride(-1) == 1, "dout must have q's dtype and a contiguous last dimension")
    scores = scores.within(max_q, max_k)
    dq, dk, dv = (torch.full_like(t, NAN, memory_format=torch.contiguous_format) for t in (q, k, v))
    for part in parts:
        check(part.rows is not None, "backward of a paged forward does not exist")
        rows, keys = slice(part.q0, part.q1), part.rows
        seen = band(part.q1 - part.q0, part.k.shape[0], scores.left, scores.right)
        found = gradients(
            dout[rows], q[rows], part.k, part.v, seen, scale=scores.scale, softcap=scores.softcap, bias=bias
        )
        if not deterministic:
            found = (found[0] * (1 + 1e-6 * (torch.rand(found[0].shape, dtype=torch.float64) - 0.5)), *found[1:])
        for grad, place, value in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
            grad[place] = value.to(q.dtype) if part.q1 > part.q0 and not scores.broken else NAN
    return dq, dk, dv


def per_sample(lse: torch.Tensor, batch: int) -> torch.Tensor:
    """[H,B*Sq] as [B,H,Sq]."""
    return lse.view(lse.shape[0], batch, -1).transpose(0, 1).contiguous()
