"""One structure of each kind, for the rules that hold for all of them."""

from __future__ import annotations

import torch

import polyattn as pa
from polyattn.structures import Structure


def one_of_each() -> dict[str, Structure]:
    """Kind -> a structure built from host data."""
    layout = pa.VideoLayout((2, 2, 2), prefix=(2,))
    return {
        "dense": pa.Dense(),
        "key_padding": pa.KeyPadding.from_lengths([4, 2], 4),
        "mask": pa.Mask(torch.ones(2, 4)),
        "packed": pa.Packed.from_lengths([2, 1, 3]),
        "spans": pa.Spans([[(1, 3)], []]),
        "paged": pa.Paged([[2, 0], [1, -1]], [3, 2], [1, 1]),
        "video_tiles": pa.VideoTiles(layout, (2, 2, 2), topk=1),
        "block_map": pa.BlockMap(torch.zeros(1, 1, 1, 1, dtype=torch.int32), [[[1]]], 64, 64),
    }


#: Shapes of q and k that the structure of each kind fits.
SHAPES = {
    "dense": ((2, 4, 2, 8), (2, 4, 2, 8)),
    "key_padding": ((2, 4, 2, 8), (2, 4, 2, 8)),
    "mask": ((2, 4, 2, 8), (2, 4, 2, 8)),
    "packed": ((6, 2, 8), (6, 2, 8)),
    "spans": ((2, 4, 2, 8), (2, 4, 2, 8)),
    "paged": ((2, 1, 2, 8), (3, 2, 2, 8)),
    "video_tiles": ((1, 10, 2, 8), (1, 10, 2, 8)),
    "block_map": ((1, 64, 2, 8), (1, 64, 2, 8)),
}
KINDS = tuple(SHAPES)
