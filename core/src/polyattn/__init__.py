"""polyattn: one attention call for diffusion and video transformers, on whatever accelerator is present.

Names are loaded on first use, so that `import polyattn` costs next to nothing and works where `import torch` fails.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyattn import distributed, graphs, integrations, structures, testing, vendor
    from polyattn.call import attention
    from polyattn.discovery import current_platform, platforms
    from polyattn.distributed import Joint, Replicated
    from polyattn.door.capability import Capability
    from polyattn.environment import PolyattnWarning, reload_environment
    from polyattn.errors import BackendUnavailable, UnsupportedRequest
    from polyattn.explanation import Explanation, explain
    from polyattn.integrations.patching import patch_sdpa
    from polyattn.layer import Attention, configure
    from polyattn.quant import Quant
    from polyattn.reference import reference_attention
    from polyattn.scope import record_routes, step, use_backend
    from polyattn.structures import (
        BlockMap,
        Dense,
        KeyPadding,
        Mask,
        Packed,
        Paged,
        PagedKVCache,
        Spans,
        VideoLayout,
        VideoTiles,
    )
    from polyattn.warming import warmup

__version__ = "0.1.0"

_HOME = {
    "Attention": "polyattn.layer",
    "BackendUnavailable": "polyattn.errors",
    "BlockMap": "polyattn.structures",
    "Capability": "polyattn.door.capability",
    "Dense": "polyattn.structures",
    "Explanation": "polyattn.explanation",
    "Joint": "polyattn.distributed",
    "KeyPadding": "polyattn.structures",
    "Mask": "polyattn.structures",
    "Packed": "polyattn.structures",
    "Paged": "polyattn.structures",
    "PagedKVCache": "polyattn.structures",
    "PolyattnWarning": "polyattn.environment",
    "Quant": "polyattn.quant",
    "Replicated": "polyattn.distributed",
    "Spans": "polyattn.structures",
    "UnsupportedRequest": "polyattn.errors",
    "VideoLayout": "polyattn.structures",
    "VideoTiles": "polyattn.structures",
    "attention": "polyattn.call",
    "configure": "polyattn.layer",
    "current_platform": "polyattn.discovery",
    "explain": "polyattn.explanation",
    "patch_sdpa": "polyattn.integrations.patching",
    "platforms": "polyattn.discovery",
    "record_routes": "polyattn.scope",
    "reference_attention": "polyattn.reference",
    "reload_environment": "polyattn.environment",
    "step": "polyattn.scope",
    "use_backend": "polyattn.scope",
    "warmup": "polyattn.warming",
}
_ROOMS = ("distributed", "graphs", "integrations", "structures", "testing", "vendor")

__all__ = [
    "Attention",
    "BackendUnavailable",
    "BlockMap",
    "Capability",
    "Dense",
    "Explanation",
    "Joint",
    "KeyPadding",
    "Mask",
    "Packed",
    "Paged",
    "PagedKVCache",
    "PolyattnWarning",
    "Quant",
    "Replicated",
    "Spans",
    "UnsupportedRequest",
    "VideoLayout",
    "VideoTiles",
    "attention",
    "configure",
    "current_platform",
    "distributed",
    "explain",
    "graphs",
    "integrations",
    "patch_sdpa",
    "platforms",
    "record_routes",
    "reference_attention",
    "reload_environment",
    "step",
    "structures",
    "testing",
    "use_backend",
    "vendor",
    "warmup",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        value: object = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _ROOMS:
        value = importlib.import_module(f"polyattn.{name}")
    else:
        raise AttributeError(f"module 'polyattn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_ROOMS})
