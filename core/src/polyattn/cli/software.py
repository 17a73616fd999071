"""This interpreter, this system, and the installed packages that matter; the standard library alone."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from polyattn import __version__
from polyattn.discovery.scan import BROKEN

#: Parts of the names of distributions that bear on attention; a vendor's own are shown by its platform too.
_TELLING = (
    "aiter", "attn", "attention", "cuda-runtime", "cudnn", "cutlass", "diffusers", "fastvideo", "fa3", "flashinfer",
    "mindie", "numpy", "torch", "transformers", "triton", "xformers",
)  # fmt: skip


def software() -> dict[str, str]:
    """polyattn, Python and the system, by name."""
    return {
        "polyattn": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "system": f"{platform.platform()} ({platform.machine()})",
    }


def packages() -> dict[str, str]:
    """Installed distributions whose names tell of attention, with versions; the first on sys.path counts."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            name, version = distribution.name, distribution.version
            if any(part in name.lower() for part in _TELLING):
                found.setdefault(name, version)
        except BROKEN:  # a damaged installation; it says nothing
            continue
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))
