"""Structures: who may attend to whom. One file each; their reference and conformance cases carry the same names."""

from polyattn.structures.base import Structure
from polyattn.structures.block_map import BlockMap
from polyattn.structures.dense import Dense
from polyattn.structures.key_padding import KeyPadding
from polyattn.structures.mask import Mask
from polyattn.structures.packed import Packed
from polyattn.structures.paged import Paged
from polyattn.structures.paged_cache import PagedKVCache
from polyattn.structures.spans import Spans
from polyattn.structures.video_tiles import VideoLayout, VideoTiles

__all__ = [
    "BlockMap",
    "Dense",
    "KeyPadding",
    "Mask",
    "Packed",
    "Paged",
    "PagedKVCache",
    "Spans",
    "Structure",
    "VideoLayout",
    "VideoTiles",
]
