"""The inverse of an index of kept rows: for each row of the padded batch, the packed row that belongs there."""

from __future__ import annotations

import weakref

import torch

from polyattn.structures.base import deriving
from polyattn.structures.lasting import lasting
from polyattn.structures.transfer import is_capturing

#: Index tensors whose inverse is remembered; an entry also goes when its index does.
_LIMIT = 64
_Key = tuple[int, int]
_Known = tuple[weakref.ref[torch.Tensor], int, torch.Tensor]
_PLACES: dict[_Key, _Known] = {}


@lasting
def places(index: torch.Tensor, total: int) -> torch.Tensor:
    """int32 [total]: the position in `index` [n] that names each of `total` rows, -1 where none does.

    Positions outside of [0, total) are dropped. Computed on the device, nothing is read back.
    """
    outside = (index < 0) | (index >= total)
    place = torch.full((total + 1,), -1, dtype=torch.int32, device=index.device)  # the last takes what is dropped
    order = torch.arange(index.shape[0], dtype=torch.int32, device=index.device)
    return place.index_copy_(0, index.to(torch.int64).masked_fill(outside, total), order).narrow(0, 0, total)


def places_of(index: torch.Tensor, total: int) -> torch.Tensor:
    """`places(index, total)`, once for an index tensor and each version of its content.

    Inference tensors have no versions: nothing is remembered of them.
    """
    if index.is_inference():
        return places(index, total)
    key = (id(index), total)
    known = _PLACES.get(key)
    version = index._version
    if known is not None and known[0]() is index and known[1] == version:
        return known[2]
    place = places(index, total)
    if not is_capturing(index.device):  # what a graph derives has no content outside of its replays
        _remember(key, (weakref.ref(index, lambda _: _PLACES.pop(key, None)), version, place))
    return place


def _remember(key: _Key, known: _Known) -> None:
    """An index may die in the midst of this, by a collection or in another thread, and take its entry with it."""
    with deriving:
        if key not in _PLACES:
            for oldest in list(_PLACES)[: max(0, len(_PLACES) - _LIMIT + 1)]:
                _PLACES.pop(oldest, None)
        _PLACES[key] = known
