"""What is put to the test: a backend of a platform that this machine has, on one of its devices."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch

from polyattn.discovery import backends_of, platform_for, platforms
from polyattn.discovery.state import all_accepted
from polyattn.door.resolution import missing_requirements
from polyattn.machine import machine_of
from polyattn.testing.cases import Case, Maker
from polyattn.testing.cases.call import Within
from polyattn.vendor import Backend, Features, Machine, Platform

#: The dtypes of the cases; a backend refuses those it does not take.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HEAD_DIM, _PAGE_SIZE = 64, 4


@dataclass(frozen=True)
class Target:
    """One backend, and the sizes that its cases are built with."""

    platform: Platform
    backend: Backend

    @property
    def name(self) -> str:
        """ "cpu:sdpa" """
        return f"{self.platform.name}:{self.backend.name}"

    @cached_property
    def device(self) -> torch.device:
        """The device that torch takes for one without an index."""
        return torch.empty(0, device=self.platform.device_type).device

    @cached_property
    def machine(self) -> Machine:
        """The facts its requests are judged by, the packages that third parties require among them."""
        return machine_of(self.platform, str(self.device))

    @property
    def features(self) -> tuple[Features, ...]:
        """What its slots claim."""
        return tuple(slot.features for slot in self.backend.slots)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of its cases: claimed or not, but float64 only if claimed, for some devices cannot hold it."""
        float64 = any("float64" in features.dtypes for features in self.features)
        return tuple(dtype for dtype in DTYPES if float64 or dtype != torch.float64)

    def dtypes_of(self, case: Case) -> tuple[torch.dtype, ...]:
        """The dtypes of one case: all, or the first claimed where the case is about the call's surroundings.

        None where the device has no such surroundings. A quantised case has those claimed beside its format, or one
        that shows the refusal.
        """
        if not self.surrounds(case.within):
            return ()
        method = None if case.quant is None else case.quant.method
        if not case.in_one_dtype and method is None:
            return self.dtypes
        possible = (torch.bfloat16, torch.float16) if case.autocast else self.dtypes
        if method is not None:
            possible = (torch.bfloat16, torch.float16, torch.float32)
        slots = [features for features in self.features if method is None or method in features.quant]
        claimed = frozenset[str]().union(*(features.dtypes for features in slots))
        found = tuple(dtype for dtype in possible if str(dtype).removeprefix("torch.") in claimed)
        return (found[:1] if case.in_one_dtype else found) or possible[:1]

    def surrounds(self, within: Within) -> bool:
        """Whether the device has what a case wants around its call."""
        module = torch.get_device_module(self.device)
        if within in ("capture", "cold_capture"):
            return self.platform.capturing is not None and hasattr(module, f"{self.device.type.upper()}Graph")
        if within == "streams":
            return hasattr(module, "set_stream")  # the CPU's streams are of name only
        return within != "no_sync" or hasattr(module, "set_sync_debug_mode")

    def missing(self) -> tuple[str, ...]:
        """Why it cannot run here at all: packages that are not installed."""
        return missing_requirements(self.backend.requires, self.machine)

    def maker(self, case: str, dtype: torch.dtype) -> Maker:
        """The source of a case's tensors, the same at every call."""
        return Maker(
            zlib.crc32(case.encode()),
            dtype,
            self.device,
            head_dim=_nearest(_HEAD_DIM, [features.head_dims for features in self.features]),
            page_size=_nearest(_PAGE_SIZE, [f.page_sizes for f in self.features if "paged" in f.kinds]),
        )


def targets(platform: str | None = None, backend: str | None = None) -> tuple[Target, ...]:
    """The backends that these names leave, of the platforms whose tensors this process routes.

    `backend` is "fa3" or "cuda:fa3". A name that nobody has raises ValueError listing those there are, with the
    reason of a platform that was not accepted.
    """
    if backend is not None and ":" in backend:
        family, _, backend = backend.partition(":")
        if platform not in (None, family):
            raise ValueError(f"backend: {family}:{backend} is not of platform {platform!r}")
        platform = family
    owners = [owner for owner in all_accepted() if platform_for(owner.device_type) is owner]
    found = tuple(
        Target(owner, candidate)
        for owner in owners
        for candidate in backends_of(owner)
        if platform in (None, owner.name) and backend in (None, candidate.name)
    )
    if not found:
        told = f" ({why_absent(platform)})" if platform is not None and platform not in [o.name for o in owners] else ""
        names = ", ".join(f"{owner.name}:{candidate.name}" for owner in owners for candidate in backends_of(owner))
        asked = ":".join(word for word in (platform, backend) if word is not None)
        raise ValueError(f"{asked}: no such backend here{told}; there are {names}")
    return found


def why_absent(platform: str) -> str | None:
    """Why a platform is not in use, in detection's own words; None if it is."""
    reports = [report for report in platforms() if report.name == platform]
    if not reports:
        return f"platform {platform} is not installed"
    if any(report.status == "accepted" for report in reports):
        return None
    return f"platform {platform} {reports[0].status}: {reports[0].reason}"


def _nearest(wanted: int, limits: list[Collection[int] | None]) -> int:
    if not limits or any(limit is None or wanted in limit for limit in limits):
        return wanted
    return min((size for limit in limits for size in limit or ()), key=lambda size: abs(size - wanted), default=wanted)
