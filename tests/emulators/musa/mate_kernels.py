"""mate's forward kernels by their contract: FlashAttention 3's rules, tiles of 64 keys, any page size.

A row that sees nothing is 0, its LSE -inf. Rows that no document has, and rows past the stated longest one, are not
written. What lies behind a document in its last tile of V enters the product with weight 0, for the bound of a load is
that of the whole tensor: a NaN there comes through.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.emulators.cuda.numerics import attend, band
from tests.emulators.musa.stack import current, lint, require

Tensor = torch.Tensor
NAN, TILE = float("nan"), 64
#: Head dims of K and V, each rounded up to one of these, must make a pair that has a configuration.
ROUNDED = (64, 128, 192, 256, 384, 512)
PAIRS = {(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (384, 384), (512, 512)}
#: "asm", "mutlass" -> calls.
counts: Counter[str] = Counter()


@dataclass(frozen=True)
class Scores:
    """How scores are made and hidden; a window's negative side is unbounded."""

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float = 0.0


class Document(NamedTuple):
    """Rows of queries, its keys and values [Sk,Hk,D], and what its last tile of V takes behind them."""

    rows: slice
    k: Tensor
    v: Tensor
    beyond: Tensor


@dataclass(frozen=True)
class Lengths:
    """Which rows are whose; all but the maxima are int32 tensors or None."""

    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    max_q: int | None = None
    max_k: int | None = None
    table: Tensor | None = None


def check(held: bool, words: str) -> None:
    """mate asserts."""
    require(held, words, AssertionError)


def check_call(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> None:
    """What the forward asserts of its tensors, in every mode."""
    require(current().capability == (3, 1), f"mate is built for MP31, and this is {current().capability}")
    given = (q, k, v, lengths.cu_q, lengths.cu_k, lengths.used_q, lengths.used_k, lengths.table)
    check(all(t is None or t.is_musa for t in given), "inputs must be on MUSA device")
    check(all(t is None or t.device == q.device for t in given), "inputs must be on MUSA device")
    check(q.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16")
    check(q.dtype == k.dtype == v.dtype, "inputs must have the same dtype")
    names = (lengths.cu_q, lengths.cu_k, lengths.used_q, lengths.used_k)
    check(all(t is None or t.dtype == torch.int32 for t in names), "cu_seqlens and seqused must be int32")
    check(all(t is None or t.stride(0) == 1 for t in names), "cu_seqlens and seqused must be contiguous")
    if lengths.table is not None:
        check(lengths.cu_k is None, "page_table is not supported with cu_seqlens_k")
        check(lengths.table.dtype == torch.int32, "page_table must be int32")
        check(lengths.table.stride(-1) == 1, "page_table must be contiguous")
        lint(lengths.used_k is not None, "pages without seqused_k: no kernel of that mode is declared")
    check(lengths.cu_q is None or lengths.max_q is not None, "max_seqlen_q is needed with cu_seqlens_q")
    check(q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv")
    check(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "k and v do not fit q")
    dims = tuple(next((d for d in ROUNDED if d >= t.shape[-1]), t.shape[-1]) for t in (q, v))
    check(dims in PAIRS, f"Add config for headdim {dims[0]}-{dims[1]}")
    batch = _batch(q, lengths.cu_q)
    over = lengths.table if lengths.table is not None else k
    check(batch == _batch(over, lengths.cu_k), "batch_size must equal batch_size_k when kv_batch_idx is None")
    check(all(t is None or t.shape == (batch,) for t in names[2:]), "seqused must have shape (batch_size,)")


def forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scores: Scores, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out as q with V's head dim; lse [H,T], or [B,H,S] of a batch. Fake tensors yield shapes."""
    if isinstance(q, FakeTensor):
        made = q.new_empty(*q.shape[:-1], v.shape[-1])
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        return (made if out is None else out), q.new_empty(shape, dtype=torch.float32)
    require(q.numel() > 0, "(emulator) no query rows: an empty grid cannot be launched")
    lint(k.numel() > 0, "no keys at all: no source says what the LSE is")
    flat = q.flatten(0, -3)
    made = torch.full((flat.shape[0], flat.shape[1], v.shape[-1]), NAN, dtype=q.dtype)
    lse = torch.full((flat.shape[1], flat.shape[0]), NAN, dtype=torch.float32)
    for part in documents(q, k, v, lengths):
        stop = part.rows.stop if lengths.max_q is None else min(part.rows.stop, part.rows.start + lengths.max_q)
        rows = slice(part.rows.start, stop)
        seen = _seen(part.rows.stop - part.rows.start, part.k.shape[0], scores)[: stop - part.rows.start]
        result, row_lse = attend(flat[rows], part.k, part.v, seen, scale=scores.scale, softcap=scores.softcap)
        if not part.beyond.isfinite().all():
            result = torch.full_like(result, NAN)
        if scores.scale <= 0.0:  # a hidden score is -inf before it is scaled
            hidden = ~seen.all(-1) | (part.k.shape[0] % TILE != 0)
            result, row_lse = result.masked_fill(hidden[:, None, None], NAN), row_lse.masked_fill(hidden, NAN)
        made[rows], lse[:, rows] = result.to(q.dtype), row_lse.float()
    made = made.view(*q.shape[:-1], v.shape[-1])
    if q.dim() == 4:
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    return (made if out is None else _written(out, made)), lse


def documents(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> list[Document]:
    """Each document's rows, keys and values. The kernels read where lengths point, so what points outside faults."""
    starts, counts_q = _rows(q, lengths.cu_q, lengths.used_q, "cu_seqlens_q")
    found = []
    for index, (start, count) in enumerate(zip(starts, counts_q, strict=True)):
        keys, values, beyond = _keys(index, k, v, lengths)
        found.append(Document(slice(start, start + count), keys, values, beyond))
    return found


def _seen(queries: int, keys: int, scores: Scores) -> Tensor:
    return band(queries, keys, scores.left, 0 if scores.causal else scores.right)


def _written(out: Tensor, made: Tensor) -> Tensor:
    """Rows that are not written keep what the buffer had."""
    return out.copy_(torch.where(made.isnan(), out, made))


def _batch(t: Tensor, cu: Tensor | None) -> int:
    return t.shape[0] if cu is None else cu.shape[0] - 1


def _rows(t: Tensor, cu: Tensor | None, used: Tensor | None, name: str) -> tuple[list[int], list[int]]:
    if cu is None:
        starts = [index * t.shape[1] for index in range(t.shape[0])]
        lengths = [t.shape[1]] * t.shape[0]
    else:
        ends = cu.tolist()
        require(len(ends) > 1, f"(emulator) {name}: no document, an empty grid cannot be launched")
        require(ends == sorted(ends) and ends[0] >= 0, f"(emulator) {name} is not ascending from 0: {ends}")
        require(ends[-1] <= t.shape[0], f"(emulator) {name} ends at {ends[-1]} of {t.shape[0]} rows: reads outside")
        starts, lengths = ends[:-1], [b - a for a, b in pairwise(ends)]
    if used is not None:
        require(
            all(0 <= u <= n for u, n in zip(used.tolist(), lengths, strict=True)), "(emulator) seqused reads outside"
        )
        lengths = used.tolist()
    return starts, lengths


def _keys(index: int, k: Tensor, v: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    if lengths.table is None:
        starts, counts_k = _rows(k, lengths.cu_k, lengths.used_k, "cu_seqlens_k")
        flat_k, flat_v = (t.flatten(0, -3) for t in (k, v))
        start, count = starts[index], counts_k[index]
        behind = (index + 1) * k.shape[1] if lengths.cu_k is None else k.shape[0]  # a sample's tiles end with it
        last = min(start + -(-count // TILE) * TILE, behind)
        return flat_k[start : start + count], flat_v[start : start + count], flat_v[start + count : last]
    page = k.shape[1]
    used = lengths.table.shape[1] * page if lengths.used_k is None else int(lengths.used_k[index])
    require(0 <= used <= lengths.table.shape[1] * page, "(emulator) seqused_k exceeds its table")
    pages = lengths.table[index, : -(-used // page)].tolist()
    require(all(0 <= number < k.shape[0] for number in pages), "(emulator) page_table: a page outside the pool")
    keys, values = (pool[pages].flatten(0, 1) for pool in (k, v))
    return keys[:used], values[:used], values[used : -(-used // TILE) * TILE]
