"""Detection happens once a process: the lock, the kept result, its warnings, forks and reloads."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from polyattn.discovery import detection as _detection
from polyattn.discovery.detection import Detection
from polyattn.discovery.loading import Outcome
from polyattn.discovery.report import PlatformReport
from polyattn.discovery.rules import EMBEDDED
from polyattn.discovery.scan import scan
from polyattn.environment import PolyattnWarning, environment, log, on_reload, warn
from polyattn.errors import BackendUnavailable
from polyattn.vendor import Platform


@dataclass
class _State:
    """`backends` belongs to `polyattn.discovery.backends`; it lives here to be dropped with the rest."""

    lock: Any = field(default_factory=threading.RLock)
    detecting: bool = False
    found: Detection | None = None
    embedded: Outcome | None = None
    backends: dict[str, Any] = field(default_factory=dict)


state = _State()


def platforms() -> tuple[PlatformReport, ...]:
    """Every platform candidate, accepted, declined, failed or skipped, and why. Never raises for one of them.

    >>> import polyattn as pa
    >>> [report.status for report in pa.platforms() if report.name == "cpu"]
    ['accepted']
    """
    return detected().reports


def platform_for(device_type: str) -> Platform | None:
    """The platform that serves tensors of this device type: of those found, the one of highest priority.

    None when nobody owns the type. "cpu" always has an owner.

    >>> platform_for("cpu").name
    'cpu'
    """
    for platform in usable().accepted:
        if platform.device_type == device_type:
            return platform
    return _embedded() if device_type == EMBEDDED.name else None


def installed_platform(name: str) -> Platform | None:
    """The installed platform of this name, whether or not its devices are present; None when there is none.

    >>> installed_platform("cpu").device_type
    'cpu'
    """
    known = (*all_accepted(), *detected().declined)
    return next((platform for platform in known if platform.name == name), None)


def current() -> Platform:
    """The platform of highest priority that was found."""
    return usable().accepted[0]


def usable() -> Detection:
    """The detection, provided that its result may be used: an override that failed raises at every use."""
    found = detected()
    if found.fatal is not None:
        raise found.fatal.error()
    if found.warnings and environment().strict:
        raise PolyattnWarning("\n".join(found.warnings) + " (POLYATTN_STRICT=1 makes this warning an error)")
    return found


def detected() -> Detection:
    """The detection, made at the first call; later calls take no lock."""
    found = state.found
    return found if found is not None else _detect_once()


def all_accepted() -> tuple[Platform, ...]:
    """The platforms found, and the embedded one even where an override left it out."""
    accepted = usable().accepted
    return accepted if any(p.name == EMBEDDED.name for p in accepted) else (*accepted, _embedded())


def announce(warnings: tuple[str, ...]) -> None:
    """Warn of each. Under POLYATTN_STRICT they are raised where the result is used, so that reports stay readable."""
    if not environment().strict:
        for text in warnings:
            warn(text)


def _detect_once() -> Detection:
    with state.lock:
        if state.found is not None:
            return state.found
        if state.detecting:
            raise RuntimeError("a platform's entry point or probe asked polyattn for the platform being detected")
        state.detecting = True
        try:
            found = _detection.detect(scan(), environment())
        finally:
            state.detecting = False
        state.found = found
    for report in found.reports:
        log.info("%s", report)
    announce(found.warnings)
    return found


def _embedded() -> Platform:
    with state.lock:
        if state.embedded is None:
            state.embedded = _detection.embedded(detected().reports)
        outcome = state.embedded
    if outcome.platform is None:
        raise BackendUnavailable.because(
            f"platform {EMBEDDED.name!r}, part of polyattn itself, is not usable: {outcome.report.reason}",
            platform=EMBEDDED.name,
        )
    return outcome.platform


@on_reload
def _drop() -> None:
    with state.lock:
        state.found, state.embedded = None, None
        state.backends.clear()


def _after_fork() -> None:
    # The child keeps what was found; a lock held by a thread of the parent would never be released here.
    state.lock, state.detecting = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
