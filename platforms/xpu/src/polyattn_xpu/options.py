"""XpuOptions: what a caller may tell Intel's backends beside the attention itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyattn.vendor import Options


@dataclass(frozen=True)
class XpuOptions(Options):
    """Options of platform `xpu`.

    finite_pages  `xpu:vllm_xpu`: no page of the pool holds NaN or infinity, not even behind a row's last key. Its
                  kernel multiplies those by 0, which NaN survives; without this word it only reads pages where they
                  are where the rows end with a step of the kernel, and copies the rows it needs elsewhere

    >>> from polyattn_xpu import XpuOptions
    >>> XpuOptions(finite_pages=True).stated()
    ('finite_pages',)
    """

    platform: ClassVar[str] = "xpu"
    finite_pages: bool = False


def vouched(options: tuple[object, ...]) -> bool:
    """Whether the caller says that pages hold finite numbers alone."""
    return any(option.finite_pages for option in options if isinstance(option, XpuOptions))
