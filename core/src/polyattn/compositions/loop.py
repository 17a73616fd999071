"""loop: packed documents through a dense slot, one call a document, and one for each run of equal documents."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from polyattn.backends.band import joined
from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.derived import derived
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import batched, inner
from polyattn.compositions.segments import piecewise
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.intervals import Intervals
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.spans import segments_of


class Run(NamedTuple):
    """`documents` neighbours of `queries` x `keys` rows each, with the same spans."""

    documents: int
    queries: int
    keys: int
    spans: Intervals


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
    return partial(document_loop, inner)


def document_loop(
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
    runs = derived(meta, ("runs", meta.lengths_q, meta.lengths_k), lambda: runs_of(meta))
    # split, not slices: its backward is one cat, while each slice's fills a gradient of all rows
    queries = q.unsqueeze(0).split(_sizes([run.documents * run.queries for run in runs], q.shape[0]), 1)
    rows_k = _sizes([run.documents * run.keys for run in runs], k.shape[0])
    keys, values = k.unsqueeze(0).split(rows_k, 1), v.unsqueeze(0).split(rows_k, 1)
    results: list[Result] = []
    for place, run in enumerate(runs):
        if run.queries == 0:
            continue
        one = (queries[place], keys[place], values[place])
        if run.keys == 0:
            results.append(empty_attention(*one, need_lse))
            continue
        if run.documents > 1:
            one = (_apart(one[0], run.documents), _apart(one[1], run.documents), _apart(one[2], run.documents))
        if run.spans:
            result = piecewise(
                inner, *one, segments=segments_of(run.spans, None, run.queries, run.keys), scale=scale,
                softcap=softcap, need_lse=need_lse, options=options,
            )  # fmt: skip
        else:
            result = inner(
                *one, None, meta=None, causal=causal or meta.spans is not None, scale=scale, window=window,
                softcap=softcap, need_lse=need_lse, options=options,
            )  # fmt: skip
        results.append(result if run.documents == 1 else _side_by_side(result))
    if queries[-1].shape[1]:  # rows past the last boundary
        results.append(empty_attention(queries[-1], k, v, need_lse))
    rows, lse = joined(results)
    return written(out, rows.squeeze(0)), None if lse is None else lse.squeeze(0)


def runs_of(meta: PackedMeta) -> tuple[Run, ...]:
    """Runs of neighbours that are alike, in order."""
    assert meta.lengths_q is not None
    assert meta.lengths_k is not None
    runs: list[Run] = []
    spans = meta.spans if meta.spans is not None else ((),) * len(meta.lengths_q)
    for document in zip(meta.lengths_q, meta.lengths_k, spans, strict=True):
        if runs and runs[-1][1:] == document:
            runs[-1] = Run(runs[-1].documents + 1, *document)
        else:
            runs.append(Run(1, *document))
    return tuple(runs)


def _sizes(rows: list[int], total: int) -> list[int]:
    """The rows of each run, then what is left."""
    return [*rows, total - sum(rows)]


def _apart(rows: torch.Tensor, documents: int) -> torch.Tensor:
    """[1,documents*rows,H,D] -> [documents,rows,H,D], a view."""
    return rows.view(documents, -1, *rows.shape[2:])


def _side_by_side(result: Result) -> Result:
    """[documents,rows,H,D] -> [1,documents*rows,H,D], and their LSE likewise."""
    out, lse = result
    return out.flatten(0, 1).unsqueeze(0), None if lse is None else lse.transpose(0, 1).flatten(1).unsqueeze(0)
