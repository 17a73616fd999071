"""VideoTiles run densely: when all tiles are kept, or where the caller lets a dense route stand in for the sparse one.

The dense slot gets the rows that hold tokens; the rows after them are 0 again, and a gate still adds its coarse term.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.video_coarse import in_tile_order, plus_coarse, scores_of
from polyattn.compositions.facts import resized
from polyattn.door.request import Request, StructureFacts


def densely(request: Request) -> Request:
    """A request for video tiles as the dense one that stands in for it; its facts still tell of the video."""
    video = request.structure_facts.video
    assert video is not None
    q, k, v = (resized(tensor, 1, video.used) for tensor in (request.q, request.k, request.v))
    return replace(request, structure_kind="dense", structure_facts=StructureFacts(video=video), q=q, k=k, v=v)


def stands_in(request: Request) -> bool:
    """Whether a dense request came from video tiles."""
    return request.structure_kind == "dense" and request.structure_facts.video is not None


def as_it_is(request: Request, rows: int) -> bool:
    """Whether the dense slot's answer is the whole answer: every row holds a token, and nothing is added."""
    video = request.structure_facts.video
    return video is None or (video.used == rows and not video.gate)


def over_tokens(inner: SlotCall, request: Request) -> SlotCall:
    """A slot for video tiles over one for `request`, a dense one that stands in."""
    return partial(_over_tokens, inner, request.scale)


def _over_tokens(
    inner: SlotCall,
    scale: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: Any,
) -> Result:
    past = q.shape[1] - meta.used
    tokens = (tensor.narrow(1, 0, meta.used) for tensor in (q, k, v)) if past else (q, k, v)
    result, lse = inner(*tokens, None, meta=None)
    if past:
        result = pad(result, (0, 0, 0, 0, 0, past))
        lse = None if lse is None else pad(lse, (0, past), value=float("-inf"))
    if meta.gate is not None:
        q, k, v = (in_tile_order(tensor, meta) for tensor in (q, k, v))
        result = plus_coarse(result, scores_of(q, k, meta, scale), v, meta)
    return written(out, result), lse
