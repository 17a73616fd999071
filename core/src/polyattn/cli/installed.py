"""The platform records of this installation: those in use, and those whose devices are elsewhere."""

from __future__ import annotations

from polyattn.discovery import PlatformReport, platform_for, platforms
from polyattn.discovery.loading import cause, produced
from polyattn.discovery.rules import BUILT_IN, EMBEDDED
from polyattn.discovery.scan import BROKEN, PLATFORMS, Candidate
from polyattn.discovery.state import detected
from polyattn.vendor import API_LEVEL, Platform


def in_use() -> tuple[Platform, ...]:
    """The platforms found here, best first, and the embedded one, which serves its tensors under any override."""
    accepted = detected().accepted
    if any(platform.name == EMBEDDED.name for platform in accepted):
        return accepted
    try:
        embedded = platform_for(EMBEDDED.name)
    except BROKEN:  # nothing may be used; the current platform's error says why
        embedded = None
    return accepted if embedded is None else (*accepted, embedded)


def loadable() -> tuple[PlatformReport, ...]:
    """The candidates whose record can be read here, whether or not their devices are present."""
    return tuple(r for r in platforms() if r.status == "accepted" or (r.status == "declined" and r.api == API_LEVEL))


def record_of(report: PlatformReport) -> Platform:
    """The record of one of `loadable()`."""
    for platform in in_use():
        if platform.name == report.name:
            return platform
    candidate = Candidate(PLATFORMS, report.name, report.entry_point, report.distribution, report.version)
    record: Platform = produced(candidate, Platform)
    return record


def platform_named(name: str) -> Platform:
    """The installed platform of that name, its devices present or not; LookupError says why there is none."""
    known = {report.name: report for report in loadable()}
    if name in known:
        try:
            return record_of(known[name])
        except BROKEN as error:
            raise LookupError(f"platform {name!r} did not load: {cause(error)}") from error
    unusable = [report for report in platforms() if report.name == name]
    if unusable:
        raise LookupError(f"platform {name!r} cannot be asked: {unusable[0]}")
    install = f'; pip install "{BUILT_IN[name]}"' if name in BUILT_IN else ""
    raise LookupError(f"platform {name!r} is not installed{install}. Installed: {', '.join(sorted(known))}")
