"""rows: key padding known on the host through a dense slot, one call for each run of equal rows, on their kept keys."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import inner
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.key_padding import KeyPaddingMeta

Window = tuple[int | None, int | None] | None
Ranges = tuple[tuple[int, int], ...]


def lower(request: Request, features: Features) -> Request | str | None:
    """Dense attention of one row. Kept keys may be fewer than Sk, so that Sk bounds them."""
    facts = request.structure_facts
    if request.structure_kind != "key_padding" or "dense" not in features.kinds:
        return None
    if not facts.host:
        return "one call a row needs the padding's lengths on the host (KeyPadding.from_lengths)"
    positions = request.causal or request.window is not None
    if positions and not facts.prefix:
        return "one call a row keeps the positions of causal and window only where every row keeps a prefix of its keys"
    dense = inner(request, "dense", request.q, request.k, request.v, StructureFacts())
    if not positions or facts.queries != "all":
        return dense
    return "causal and window over kept keys shorter than Sk lie off the bottom-right diagonal of one call"


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot, once a run of equal rows."""
    return partial(padded_rows, inner)


def takes(meta: KeyPaddingMeta, causal: bool, window: Window) -> bool:
    """Whether `padded_rows` can run: gathering a row with holes would move the positions that causal and window use."""
    if meta.ranges is None:
        return False
    return not (causal or window is not None) or all(len(row) <= 1 for row in meta.ranges)


def padded_rows(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A key padding slot over a dense one, for what `takes` says.

    Causal or a window over keys that end before Sk while all queries are kept become a window shifted by as much,
    whose sides may be negative.
    """
    assert meta.ranges is not None
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    row = 0
    for kept, group in groupby(meta.ranges):
        count = len(tuple(group))
        batch = (q.narrow(0, row, count), k.narrow(0, row, count), v.narrow(0, row, count))
        row += count
        if not kept:
            piece, lse = empty_attention(*batch, need_lse)
        else:
            keys, values = _kept(batch[1], kept), _kept(batch[2], kept)
            queries = batch[0] if meta.queries == "all" else _kept(batch[0], kept)
            rule = shifted(causal, window, k.shape[1] - kept[-1][1] if meta.queries == "all" else 0)
            piece, lse = inner(
                queries, keys, values, None, meta=None, causal=rule[0], scale=scale, window=rule[1], softcap=softcap,
                need_lse=need_lse, options=options,
            )  # fmt: skip
            if meta.queries != "all":
                piece = _spread(piece, 1, kept, q.shape[1], 0.0)
                lse = None if lse is None else _spread(lse, 2, kept, q.shape[1], float("-inf"))
        outs.append(piece)
        if lse is not None:
            lses.append(lse)
    result = outs[0] if len(outs) == 1 else torch.cat(outs)
    return written(out, result), torch.cat(lses) if lses else None


def shifted(causal: bool, window: Window, missing: int) -> tuple[bool, Window]:
    """Causal and window for keys of which the last `missing` are gone: the same keys of the same queries."""
    if missing == 0 or not (causal or window is not None):
        return causal, window
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    return False, (None if left is None else left - missing, None if right is None else right + missing)


def _kept(tensor: torch.Tensor, kept: Ranges) -> torch.Tensor:
    """The kept positions of [n,S,H,D]: a view where they are one run."""
    pieces = [tensor.narrow(1, start, end - start) for start, end in kept]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _spread(rows: torch.Tensor, axis: int, kept: Ranges, width: int, fill: float) -> torch.Tensor:
    """Kept positions along `axis` put back among `width`, the others being `fill`."""
    behind = (0, 0) * (rows.dim() - 1 - axis)
    pieces = []
    taken = position = 0
    for (start, end), after in zip(kept, (*(following for following, _ in kept[1:]), width), strict=True):
        part = rows.narrow(axis, taken, end - start)
        pieces.append(pad(part, (*behind, start - position, after - end), value=fill))
        taken, position = taken + end - start, after
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)
