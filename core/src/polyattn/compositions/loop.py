"""loop: packed documents through a dense slot, one call a document, and one for each run of equal documents."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.derived import derived
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import batched, inner
from polyattn.compositions.segments import piecewise
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.spans import segments_of


class Run(NamedTuple):
    """`documents` neighbours of `queries` x `keys` rows each, with the same spans."""

    start_q: int
    start_k: int
    documents: int
    queries: int
    keys: int
    spans: tuple[tuple[int, int], ...]


def lower(request: Request, features: Features) -> Request | str | None:
    """Dense attention of one document, whose length T bounds; with spans its pieces are causal or dense."""
    facts = request.structure_facts
    if request.structure_kind != "packed" or "dense" not in features.kinds:
        return None
    if not facts.host:
        return "a loop over documents needs their lengths on the host (Packed.from_lengths)"
    if request.capturing and facts.capacity:
        return "a loop over documents would bake their lengths into the captured graph"
    tensors = (batched(request.q), batched(request.k), batched(request.v))
    return inner(request, "dense", *tensors, StructureFacts(), causal=request.causal or facts.spans)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot, once a run of equal documents."""
    return partial(documents, inner)


def documents(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    scale: float,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A packed slot over a dense one: q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv]; lengths are known on the host."""
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    done = 0
    for run in derived(meta, ("runs", meta.lengths_q, meta.lengths_k), lambda: runs_of(meta)):
        count, queries, keys = run.documents, run.queries, run.keys
        done = run.start_q + count * queries
        batch = (
            _stacked(q, run.start_q, count, queries),
            _stacked(k, run.start_k, count, keys),
            _stacked(v, run.start_k, count, keys),
        )
        if keys == 0:
            piece, lse = empty_attention(*batch, need_lse)
        elif run.spans:
            piece, lse = piecewise(
                inner, *batch, segments=segments_of(run.spans, None, queries, keys),
                scale=scale, softcap=softcap, need_lse=need_lse, options=options,
            )  # fmt: skip
        else:
            piece, lse = inner(
                *batch, None, meta=None, causal=causal or meta.spans is not None, scale=scale, window=window,
                softcap=softcap, need_lse=need_lse, options=options,
            )  # fmt: skip
        outs.append(piece.flatten(0, 1))
        if lse is not None:
            lses.append(lse.transpose(0, 1).flatten(1))
    if done < q.shape[0]:  # rows past the last boundary
        piece, lse = empty_attention(q.narrow(0, done, q.shape[0] - done), k, v, need_lse)
        outs.append(piece)
        if lse is not None:
            lses.append(lse)
    result = outs[0] if len(outs) == 1 else torch.cat(outs)
    return written(out, result), torch.cat(lses, dim=1) if need_lse else None


def _stacked(tensor: torch.Tensor, start: int, documents: int, rows: int) -> torch.Tensor:
    """Neighbouring documents of [T,H,D] as [documents,rows,H,D], a view."""
    return tensor.narrow(0, start, documents * rows).view(documents, rows, *tensor.shape[1:])


def runs_of(meta: PackedMeta) -> tuple[Run, ...]:
    """Runs of neighbours that are alike, in order; documents without queries are left out."""
    assert meta.lengths_q is not None
    assert meta.lengths_k is not None
    runs: list[Run] = []
    start_q = start_k = 0
    for index, (queries, keys) in enumerate(zip(meta.lengths_q, meta.lengths_k, strict=True)):
        spans = meta.spans[index] if meta.spans is not None else ()
        last = runs[-1] if runs else None
        if queries == 0:
            pass
        elif (
            last is not None and last[3:] == (queries, keys, spans) and start_k == last.start_k + last.documents * keys
        ):
            runs[-1] = last._replace(documents=last.documents + 1)
        else:
            runs.append(Run(start_q, start_k, 1, queries, keys, spans))
        start_q += queries
        start_k += keys
    return tuple(runs)
