"""The inverse of an index of kept rows: for each row of the padded batch, the packed row that belongs there."""

from __future__ import annotations

import weakref

import torch

from polyattn.structures.base import keep
from polyattn.structures.lasting import lasting
from polyattn.structures.transfer import is_capturing

#: Index tensors whose inverse is remembered; an entry also goes when its index does.
_LIMIT = 64
_PLACES: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}


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
    """`places(index, total)`, once for an index tensor and each version of its content."""
    key = (id(index), total)
    known = _PLACES.get(key)
    version = -1 if index.is_inference() else index._version
    if known is not None and known[0]() is index and known[1] == version:
        return known[2]
    place = places(index, total)
    if not is_capturing(index.device):  # what a graph derives has no content outside of its replays
        keep(_PLACES, _LIMIT, key, (weakref.ref(index, lambda _: _PLACES.pop(key, None)), version, place))
    return place
