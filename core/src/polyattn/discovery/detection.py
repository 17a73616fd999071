"""From candidates to platforms: ask them, order what was found, say what is wrong. No state here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyattn.discovery.loading import Outcome, complaint, settle
from polyattn.discovery.report import PlatformReport
from polyattn.discovery.rules import BUILT_IN, EMBEDDED, Verdict, judge_backends, judge_platforms
from polyattn.discovery.scan import BACKENDS, PLATFORMS, Candidate
from polyattn.environment import PLATFORM, PLUGINS, Environment, normalised
from polyattn.errors import BackendUnavailable
from polyattn.vendor import Platform

_AUTOMATIC = f"Unset {PLATFORM} to return to automatic choice"
_STATUS_ORDER = ("accepted", "declined", "failed", "skipped")


@dataclass(frozen=True)
class Fatal:
    """Why no platform may be used; `unknown_name` when the name asked for is one that nobody has."""

    message: str
    platform: str | None
    unknown_name: bool = False

    def error(self) -> ValueError:
        """A fresh exception."""
        if self.unknown_name:
            return ValueError(self.message)
        return BackendUnavailable.because(self.message, platform=self.platform)


@dataclass(frozen=True)
class Detection:
    """What this process found.

    accepted    the usable platforms, best first
    declined    installed platforms whose devices are not here: one can still ask about described machines
    backends    third-party backends, judged by name and distribution only; none is imported yet
    """

    reports: tuple[PlatformReport, ...]
    accepted: tuple[Platform, ...]
    backends: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    fatal: Fatal | None = None
    declined: tuple[Platform, ...] = ()


def detect(candidates: Iterable[Candidate], env: Environment) -> Detection:
    """Ask every candidate that may be asked."""
    candidates = tuple(candidates)
    outcomes = [settle(v) for v in judge_platforms((c for c in candidates if c.group == PLATFORMS), env)]
    accepted = _best_first(outcome.platform for outcome in outcomes if outcome.platform is not None)
    reports = tuple(sorted((outcome.report for outcome in outcomes), key=_report_order))
    # Under an override the other platforms' faults are nobody's concern; their reports still tell.
    asked = [outcome for outcome in outcomes if env.platform in (None, outcome.report.name)]
    warnings = [outcome.warning for outcome in asked if outcome.warning]
    fatal = None
    if env.platform is not None and not accepted:
        fatal = _override_failed(env, reports)
    elif not accepted:
        fatal = Fatal(f"no platform is usable: {_told(reports)}. polyattn.platforms() has the tracebacks", None)
    warnings += _several(accepted)
    backends = judge_backends((c for c in candidates if c.group == BACKENDS), env)
    # A misnamed backend belongs to no platform that could complain later; a clash waits for its platform.
    warnings += [complaint("backend", v.candidate, v.failed) for v in backends if v.failed and not v.shared]
    declined = tuple(outcome.declined for outcome in outcomes if outcome.declined is not None)
    return Detection(reports, accepted, backends, tuple(dict.fromkeys(warnings)), fatal, declined)


def embedded(reports: Iterable[PlatformReport]) -> Outcome:
    """The core's own platform, asked apart: an override does not load it, yet its tensors still need a platform."""
    known = [r for r in reports if r.name == EMBEDDED.name and r.status == "skipped"]
    return settle(Verdict(replace(EMBEDDED, version=known[0].version) if known else EMBEDDED))


def _best_first(platforms: Iterable[Platform]) -> tuple[Platform, ...]:
    # Only a higher priority displaces the embedded platform, hence its place among equals.
    return tuple(sorted(platforms, key=lambda p: (-p.priority, p.name != EMBEDDED.name, p.name)))


def _report_order(report: PlatformReport) -> tuple[int, int, str, str]:
    return _STATUS_ORDER.index(report.status), -(report.priority or 0), report.name, report.distribution


def _several(accepted: tuple[Platform, ...]) -> list[str]:
    rivals = [platform for platform in accepted if platform.name != EMBEDDED.name]
    if len(rivals) < 2:
        return []
    listed = ", ".join(f"{p.name} (priority {p.priority})" for p in rivals)
    best = accepted[0].name
    text = (
        f"several accelerator platforms were found: {listed}; {best!r} is current_platform, by priority and then by "
        f"name. Set {PLATFORM}={best} to confirm it, or name another"
    )
    return [text]


def _override_failed(env: Environment, reports: tuple[PlatformReport, ...]) -> Fatal:
    name = env.platform or ""
    asked = f"{PLATFORM}={env.given.get(PLATFORM, name)!r}"
    mine = [report for report in reports if report.name == name]
    others = sorted({report.name for report in reports if report.status == "skipped"} - {name})
    reasons = [f"{r.distribution} {r.version} {_verb(r)}: {r.reason}" for r in mine]
    if name in BUILT_IN and all(normalised(r.distribution) != BUILT_IN[name] for r in mine):
        reasons.append(f'distribution {BUILT_IN[name]} is not installed: pip install "polyattn[{name}]"')
    if reasons:
        found = f"Other platforms installed: {', '.join(others) or 'none'}"
        return Fatal(
            f"{asked}: platform {name!r} is not available here: {'; '.join(reasons)}. {found}. {_AUTOMATIC}", name
        )
    absent = sorted(set(BUILT_IN) - set(others))
    more = f"; once installed also {', '.join(absent)}" if absent else ""
    return Fatal(
        f"{asked} names no platform. Valid names: {', '.join(others)}{more}. {_AUTOMATIC}", name, unknown_name=True
    )


def _verb(report: PlatformReport) -> str:
    if report.status == "declined":
        return "was not found on this machine"
    return f"is left out by {PLUGINS}" if report.status == "skipped" else "failed"


def _told(reports: Iterable[PlatformReport]) -> str:
    return "; ".join(f"{r.name} ({r.distribution} {r.version}) {r.status}: {r.reason}" for r in reports)
