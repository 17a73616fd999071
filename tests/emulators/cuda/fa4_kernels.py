"""What FlashAttention 4 computes on sm_90, by float64 formulas: its asserts, and what it leaves unwritten.

What the wheel reads without a word as something else than meant (a single negative window side) is an error here. Keys
are loaded in whole tiles: a NaN in a value behind a document's end, but in its last tile, spoils the document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.emulators.cuda.numerics import attend, band, gradients

Window = tuple[int | None, int | None]
_NAN = float("nan")
_TILE = 128


class Lengths(NamedTuple):
    """What says how long documents are: boundaries, used rows, pages."""

    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    used_q: torch.Tensor | None = None
    used_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    max_q: int | None = None


class Rule(NamedTuple):
    """All that a call says beside q, k, v."""

    scale: float | None
    causal: bool
    window: Window
    softcap: float
    num_splits: int
    lengths: Lengths
    need_lse: bool

    def sides(self) -> tuple[int, int]:
        """Window sides, -1 unbounded. Both negative is the wheel's word for none; one alone hides keys unasked."""
        left, right = self.window
        if left is not None and right is not None and left < 0 and right < 0:
            left = right = None
        right = 0 if self.causal else right
        if any(side is not None and side < 0 for side in (left, right)):
            raise ValueError(f"window_size {self.window}: a single negative side is a real bound; unbounded is None")
        return -1 if left is None else left, -1 if right is None else right


class _Document(NamedTuple):
    """Rows of the flattened queries, keys and values, where those lie in the flattened k, what their tile ends in."""

    rows: slice
    k: torch.Tensor
    v: torch.Tensor
    keys: slice | None
    behind: torch.Tensor

    @property
    def asked(self) -> int:
        return int(self.rows.stop - self.rows.start)


class Attention(torch.autograd.Function):
    """The forward, with gradients through the output and, where it is asked for, the LSE."""

    @staticmethod
    def forward(ctx, q, k, v, rule):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return forward(q, k, v, rule, q.requires_grad or k.requires_grad or v.requires_grad)

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        rule = ctx.rule
        assert rule.lengths.page_table is None, "backward of pages does not exist"
        dlse = dlse if rule.need_lse else None
        dout = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype) if dout is None else dout
        grads = tuple(torch.full_like(t, _NAN, memory_format=torch.contiguous_format) for t in (q, k, v))
        flat = tuple(grad.view(-1, *grad.shape[-2:]) for grad in grads)
        rows_dout = dout.reshape(-1, *dout.shape[-2:])
        rows_dlse = None if dlse is None else _rows_of_lse(dlse)
        flat_q = q.reshape(-1, *q.shape[-2:])
        for part in _documents(q, k, v, rule.lengths):
            seen = band(part.asked, part.k.shape[0], *rule.sides())
            found = gradients(
                rows_dout[part.rows], flat_q[part.rows], part.k, part.v, seen, scale=_scale(q, rule),
                softcap=rule.softcap, dlse=None if rows_dlse is None else rows_dlse[:, part.rows],
            )  # fmt: skip
            for grad, place, value in zip(flat, (part.rows, part.keys, part.keys), found, strict=True):
                grad[place] = value.to(q.dtype)
        return (*grads, None)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, wants_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and lse; NaN where nothing is written."""
    _check(q, k, v, rule)
    rows = q.reshape(-1, *q.shape[-2:])
    out = torch.full((rows.shape[0], q.shape[-2], v.shape[-1]), _NAN, dtype=q.dtype)
    lse = torch.full((q.shape[-2], rows.shape[0]), _NAN, dtype=torch.float32)
    keys = v.shape[0] * v.shape[1] if v.dim() == 4 else v.shape[0]
    if rows.shape[0] == 0 or keys == 0:
        out, lse = out.zero_(), lse.fill_(float("-inf"))
    else:
        scale = _scale(q, rule)
        broken = scale <= 0.0 and not rule.softcap  # -inf of a hidden score times such a scale
        for part in _documents(q, k, v, rule.lengths):
            stop = part.rows.stop
            if rule.lengths.max_q is not None and rule.lengths.cu_q is not None:
                stop = min(stop, part.rows.start + rule.lengths.max_q)  # later tiles are never launched
            written = slice(part.rows.start, stop)
            seen = band(part.asked, part.k.shape[0], *rule.sides())[: stop - part.rows.start]
            result, row_lse = attend(rows[written], part.k, part.v, seen, scale=scale, softcap=rule.softcap)
            spoilt = broken or (part.k.shape[0] > 0 and not bool(part.behind.isfinite().all()))
            out[written] = _NAN if spoilt else result.to(q.dtype)
            lse[:, written] = row_lse.float()
    out = out.view(*q.shape[:-1], v.shape[-1])
    if q.dim() == 4:
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse if rule.need_lse or wants_grad else None


def _documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> list[_Document]:
    queries = _bounds(q, lengths.cu_q, lengths.used_q)
    keys = _bounds(k, lengths.cu_k, lengths.used_k) if lengths.page_table is None else None
    flat_k, flat_v = k.flatten(0, -3), v.flatten(0, -3)
    parts = []
    for index, (start, stop) in enumerate(queries):
        if keys is not None:
            place = slice(*keys[index])
            end = len(flat_v) if lengths.cu_k is not None else (index + 1) * v.shape[1]
            behind = flat_v[place.stop : min(end, place.stop + -(place.stop - place.start) % _TILE)]
            parts.append(_Document(slice(start, stop), flat_k[place], flat_v[place], place, behind))
            continue
        assert lengths.page_table is not None
        assert lengths.used_k is not None, "the lengths of pages come from seqused_k"
        count, page = int(lengths.used_k[index]), k.shape[1]
        table = lengths.page_table[index, : -(-count // page)].tolist()
        if any(not 0 <= entry < k.shape[0] for entry in table):
            raise IndexError("page_table: a page outside the pool is read")
        one, other = (pool[table].flatten(0, 1) for pool in (k, v))
        behind = other[count:] if page % _TILE == 0 else other[:0]  # by whole tiles only where pages hold such
        parts.append(_Document(slice(start, stop), one[:count], other[:count], None, behind))
    return parts


def _bounds(tensor: torch.Tensor, cu: torch.Tensor | None, used: torch.Tensor | None) -> list[tuple[int, int]]:
    """Start and stop of each document in the flattened rows."""
    if cu is not None:
        values = cu.tolist()
        if values != sorted(values) or values[0] != 0 or values[-1] > tensor.shape[0]:
            raise IndexError(f"cu_seqlens {values}: rows outside the {tensor.shape[0]} given are read")
        starts, stops = values[:-1], values[1:]
    else:
        starts = [index * tensor.shape[1] for index in range(tensor.shape[0])]
        stops = [start + tensor.shape[1] for start in starts]
    if used is not None:
        stops = [start + count for start, count in zip(starts, used.tolist(), strict=True)]
    return list(zip(starts, stops, strict=True))


def _rows_of_lse(lse: torch.Tensor) -> torch.Tensor:
    """[B,H,S] or [H,T] -> [H,rows]"""
    return lse if lse.dim() == 2 else lse.transpose(0, 1).flatten(1)


def _scale(q: torch.Tensor, rule: Rule) -> float:
    return q.shape[-1] ** -0.5 if rule.scale is None else rule.scale


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> None:
    cu_q, cu_k, used_q, used_k, table, _ = rule.lengths
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    half = v.dtype in (torch.float16, torch.bfloat16)
    _assert(half, "inputs must be float16 or bfloat16; FP8 is only supported on SM100")
    _assert(q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype")
    _assert(q.dim() == (4 if cu_q is None else 3), "q is packed with boundaries, else batched")
    _assert(cu_k is None or table is None, "page_table is not supported with cu_seqlens_k")
    _assert(k.dim() == v.dim() == (4 if cu_k is None else 3), "k and v are packed with boundaries, else batched")
    _assert(k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1], "k must fit q, and v fit k")
    if table is not None:
        _assert(table.dtype == torch.int32, "page_table must be int32")
        _assert(table.stride(-1) == 1, "page_table must be contiguous in the last dimension")
        _assert(table.shape[0] == batch, "page_table must have a row a batch entry")
    elif cu_k is None:
        _assert(k.shape[0] == batch, "k must have q's batch")
    else:
        _assert(cu_k.shape == (batch + 1,), "cu_seqlens_k must have shape (batch_size + 1,)")
    for used in (used_q, used_k):
        _assert(used is None or used.shape == (batch,), "seqused_q, seqused_k must have shape (batch_size,)")
    for given in (cu_q, cu_k, used_q, used_k):
        _assert(given is None or given.dtype == torch.int32, "cu_seqlens, seqused must be int32")
        _assert(given is None or given.stride(0) == 1, "cu_seqlens, seqused must be contiguous")
    _assert(q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv")
    for size in (q.shape[-1], v.shape[-1]):
        _assert(size in range(8, 257, 8), "head_dim must be between 8 and 256 and divisible by 8 on SM90")
    _assert(rule.num_splits == 1, "Split-KV is SM100 only")


def _assert(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
