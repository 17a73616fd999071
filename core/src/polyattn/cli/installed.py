"""The platforms of this installation: those in use, and those whose devices are elsewhere."""

from __future__ import annotations

from polyattn.discovery import installed_platform, platform_for, platforms
from polyattn.discovery.rules import BUILT_IN, EMBEDDED
from polyattn.discovery.scan import BROKEN
from polyattn.discovery.state import detected
from polyattn.vendor import Platform


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


def installed() -> tuple[Platform, ...]:
    """Every platform whose record could be read, whether or not its devices are here."""
    return (*in_use(), *detected().declined)


def platform_named(name: str) -> Platform:
    """The installed platform of that name; LookupError says why there is none."""
    platform = installed_platform(name)
    if platform is not None:
        return platform
    unusable = [report for report in platforms() if report.name == name]
    if unusable:
        raise LookupError(f"platform {name!r} cannot be asked: {unusable[0]}")
    install = f'; pip install "{BUILT_IN[name]}"' if name in BUILT_IN else ""
    known = ", ".join(sorted(platform.name for platform in installed()))
    raise LookupError(f"platform {name!r} is not installed{install}. Installed: {known}")
