"""Ask one candidate: import it, take its platform, probe. Whatever goes wrong becomes its report."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

from polyattn.discovery.report import PlatformReport
from polyattn.discovery.rules import Verdict
from polyattn.discovery.scan import BROKEN, Candidate
from polyattn.vendor import API_LEVEL, Declined, Found, Platform

_SLOW_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """A report; the platform when it was accepted, or declined by its probe; a warning when it was broken."""

    report: PlatformReport
    platform: Platform | None = None
    declined: Platform | None = None
    warning: str = ""


def settle(verdict: Verdict) -> Outcome:
    """The outcome of a verdict: ask the candidate if it may be asked."""
    blank = _blank(verdict.candidate)
    if verdict.skipped:
        return Outcome(replace(blank, status="skipped", reason=verdict.skipped))
    if verdict.failed:
        warning = verdict.failed if verdict.shared else complaint("platform", verdict.candidate, verdict.failed)
        return Outcome(replace(blank, reason=verdict.failed), warning=warning)
    return _ask(verdict.candidate, blank)


def produced(candidate: Candidate, wanted: type[Any]) -> Any:
    """What the entry point gives: an instance of `wanted`, or a callable returning one."""
    loaded = candidate.load()
    value = loaded if isinstance(loaded, wanted) or not callable(loaded) else loaded()
    if not isinstance(value, wanted):
        raise TypeError(
            f"entry point {candidate.value} gives {type(value).__name__}, "
            f"not a polyattn.vendor.{wanted.__name__} or a function returning one"
        )
    return value


def cause(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def complaint(what: str, candidate: Candidate, reason: str) -> str:
    """The warning about a plugin that is not used."""
    ask = "platforms()" if what == "platform" else "discovery.backend_reports()"
    return (
        f"{what} plugin {candidate} is not used: {reason}. Repair or uninstall {candidate.distribution}; "
        f"polyattn.{ask} keeps the report"
    )


def _ask(candidate: Candidate, blank: PlatformReport) -> Outcome:
    start = time.perf_counter()
    try:
        platform = produced(candidate, Platform)
        _check(candidate, platform)
        known = replace(blank, device_type=platform.device_type, priority=platform.priority, api=platform.api)
        if platform.api != API_LEVEL:
            reason = f"it speaks level {platform.api} of polyattn.vendor, this polyattn speaks level {API_LEVEL}"
            return Outcome(_timed(replace(known, status="declined", reason=reason), start))
        answer = platform.probe()
        if isinstance(answer, Declined):
            return Outcome(_timed(replace(known, status="declined", reason=answer.reason), start), declined=platform)
        if not isinstance(answer, Found):
            raise TypeError(f"its probe returned {type(answer).__name__}, not Found or Declined")
    except BROKEN as error:
        reason = cause(error)
        report = replace(blank, reason=reason, traceback="".join(traceback.format_exception(error)))
        return Outcome(_timed(report, start), warning=complaint("platform", candidate, reason))
    report = replace(known, status="accepted", detail=answer.detail, devices=answer.devices)
    return Outcome(_timed(report, start), platform)


def _check(candidate: Candidate, platform: Platform) -> None:
    if platform.name != candidate.name:
        raise ValueError(f"the entry point is named {candidate.name!r}, but its platform {platform.name!r}")
    if not isinstance(platform.device_type, str) or not platform.device_type:
        raise TypeError(f"Platform.device_type must be torch's device type, a str, not {platform.device_type!r}")
    if not isinstance(platform.priority, int):
        raise TypeError(f"Platform.priority must be an int, not {platform.priority!r}")


def _blank(candidate: Candidate) -> PlatformReport:
    return PlatformReport(candidate.name, candidate.distribution, candidate.version, candidate.value, "failed")


def _timed(report: PlatformReport, start: float) -> PlatformReport:
    seconds = time.perf_counter() - start
    slow = f"slow: {seconds:.1f} s to import and probe" if seconds > _SLOW_SECONDS else ""
    detail = "; ".join(text for text in (report.detail, slow) if text)
    return replace(report, seconds=round(seconds, 6), detail=detail)
