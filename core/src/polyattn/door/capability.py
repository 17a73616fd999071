"""Capability flags, derived from what slots state; a flag is never written down apart from its slot."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyattn.door.backend import Features


class Capability(Flag):
    """What a slot can do. Combine with `|`: one slot must then have all of it.

    >>> from polyattn import Capability
    >>> both = Capability.PACKED_MASK_FREE | Capability.LSE
    >>> Capability.LSE in both
    True
    """

    PACKED_MASK_FREE = auto()
    MULTI_DOC_VARLEN = auto()
    PAGED_KV = auto()
    KEY_PADDING = auto()
    BOOL_MASK = auto()
    BIAS = auto()
    SPANS = auto()
    PREFIX_KV = auto()
    VIDEO_TILES = auto()
    WINDOW = auto()
    SOFTCAP = auto()
    LSE = auto()
    BACKWARD = auto()
    DETERMINISTIC = auto()
    OUT = auto()
    GRAPH_CAPTURE = auto()
    COMPILE = auto()
    QUANT_FP8 = auto()
    QUANT_INT8 = auto()
    QUANT_MXFP8 = auto()
    QUANT_MXFP4 = auto()


#: Structure kind, and switch of `Features` -> its flag.
BY_KIND = {
    "packed": Capability.PACKED_MASK_FREE,
    "paged": Capability.PAGED_KV,
    "key_padding": Capability.KEY_PADDING,
    "mask": Capability.BOOL_MASK,
    "bias": Capability.BIAS,
    "spans": Capability.SPANS,
    "prefix_kv": Capability.PREFIX_KV,
    "video_tiles": Capability.VIDEO_TILES,
}
BY_SWITCH = {
    "window": Capability.WINDOW,
    "softcap": Capability.SOFTCAP,
    "lse": Capability.LSE,
    "backward": Capability.BACKWARD,
    "deterministic": Capability.DETERMINISTIC,
    "out": Capability.OUT,
    "capture": Capability.GRAPH_CAPTURE,
    "compile": Capability.COMPILE,
}


def capabilities_of(features: Features) -> Capability:
    """The flags of one slot."""
    flags = Capability(0)
    for kind, flag in BY_KIND.items():
        if kind in features.kinds:
            flags |= flag
    if "packed" in features.kinds and features.max_documents != 1:
        flags |= Capability.MULTI_DOC_VARLEN
    for switch, flag in BY_SWITCH.items():
        if getattr(features, switch):
            flags |= flag
    for name in features.quant:
        flags |= Capability[f"QUANT_{name.upper()}"]
    return flags
