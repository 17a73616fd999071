"""The conformance cases, one file a structure."""

from polyattn.testing.cases import block_map, dense, key_padding, mask, packed, paged, spans, video_tiles
from polyattn.testing.cases.call import Call, Case
from polyattn.testing.cases.maker import Heads, Maker

__all__ = ["ALL_CASES", "Call", "Case", "Heads", "Maker"]

ALL_CASES: tuple[Case, ...] = (
    *dense.CASES,
    *key_padding.CASES,
    *mask.CASES,
    *packed.CASES,
    *spans.CASES,
    *paged.CASES,
    *video_tiles.CASES,
    *block_map.CASES,
)
