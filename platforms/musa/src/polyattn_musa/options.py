"""MusaOptions: what a caller may tell Moore Threads' backends beside the attention itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyattn.vendor import Options


@dataclass(frozen=True)
class MusaOptions(Options):
    """Options of platform `musa`.

    finite_pages  `musa:mate`: no page of the pool holds NaN or infinity, not even behind a row's last key. What a
                  kernel's tile holds there is multiplied by 0, which NaN survives; without this word pages are only
                  read where they are where the rows end with a tile, and the rows needed are copied elsewhere

    >>> from polyattn_musa import MusaOptions
    >>> MusaOptions(finite_pages=True).stated()
    ('finite_pages',)
    """

    platform: ClassVar[str] = "musa"
    finite_pages: bool = False


def vouched(options: tuple[object, ...]) -> bool:
    """Whether the caller says that pages hold finite numbers alone."""
    return any(option.finite_pages for option in options if isinstance(option, MusaOptions))
