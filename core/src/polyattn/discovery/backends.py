"""A platform's backends: its own, then those that third parties add through the group `polyattn.backends`."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyattn.discovery.loading import cause, complaint, produced
from polyattn.discovery.report import BackendReport
from polyattn.discovery.rules import Verdict, split_backend_name
from polyattn.discovery.scan import BROKEN, load
from polyattn.discovery.state import all_accepted, announce, detected, state
from polyattn.environment import PolyattnWarning, environment, warn
from polyattn.errors import BackendUnavailable
from polyattn.vendor import Backend, Platform


@dataclass(frozen=True)
class _Resolved:
    platform: Platform
    backends: tuple[Backend, ...]
    reports: tuple[BackendReport, ...]
    warnings: tuple[str, ...]


def backends_of(platform: Platform) -> tuple[Backend, ...]:
    """The platform's backends in its own order, then third-party ones by name; imported at the first call.

    >>> from polyattn.discovery import platform_for
    >>> all(isinstance(backend.name, str) for backend in backends_of(platform_for("cpu")))
    True
    """
    known = state.backends.get(platform.name)
    if known is None or known.platform is not platform:
        known = _resolve_once(platform)
    if known.warnings and environment().strict:
        raise PolyattnWarning("\n".join(known.warnings) + " (POLYATTN_STRICT=1 makes this warning an error)")
    backends: tuple[Backend, ...] = known.backends
    return backends


def all_backend_names() -> dict[str, tuple[str, ...]]:
    """Platform name -> its backends' names, of every installed platform: the valid names of a choice."""
    names: dict[str, tuple[str, ...]] = {}
    for platform in (*all_accepted(), *detected().declined):
        try:
            names[platform.name] = tuple(backend.name for backend in backends_of(platform))
        except BackendUnavailable as error:
            # Names are asked for in error messages and for other platforms' sake: one broken platform is not theirs.
            warn(str(error))
            names[platform.name] = ()
    return names


def backend_reports() -> tuple[BackendReport, ...]:
    """Every third-party backend and what became of it; one whose platform was not used is "skipped", never imported."""
    settled = {(r.platform, r.backend, r.distribution): r for known in state.backends.values() for r in known.reports}
    present = {platform.name for platform in detected().accepted}
    reports = []
    for verdict in detected().backends:
        report = _verdict_report(verdict)
        if verdict.may_be_asked:
            why = "has not been used yet" if report.platform in present else "is not in use here"
            unused = replace(report, status="skipped", reason=f"platform {report.platform!r} {why}")
            report = settled.get((report.platform, report.backend, report.distribution), unused)
        reports.append(report)
    return tuple(reports)


def _resolve_once(platform: Platform) -> _Resolved:
    verdicts = detected().backends
    with state.lock:
        known: _Resolved | None = state.backends.get(platform.name)
        if known is not None and known.platform is platform:
            return known
        known = _resolve(platform, verdicts)
        state.backends[platform.name] = known
    announce(known.warnings)
    return known


def _resolve(platform: Platform, verdicts: Iterable[Verdict]) -> _Resolved:
    found = {backend.name: backend for backend in _own(platform)}
    reports, warnings = [], []
    for verdict in verdicts:
        usable = verdict.may_be_asked or verdict.shared
        if split_backend_name(verdict.candidate.name)[0] != platform.name or not usable:
            continue
        report, backend = _third_party(verdict, tuple(found))
        reports.append(report)
        if backend is not None:
            found[backend.name] = backend
        else:
            warnings.append(report.reason if verdict.shared else complaint("backend", verdict.candidate, report.reason))
    return _Resolved(platform, tuple(found.values()), tuple(reports), tuple(dict.fromkeys(warnings)))


def _own(platform: Platform) -> tuple[Backend, ...]:
    try:
        given = load(platform.backends) if isinstance(platform.backends, str) else platform.backends
        backends = tuple(given)
        strange = [type(backend).__name__ for backend in backends if not isinstance(backend, Backend)]
        if strange:
            raise TypeError(f"only polyattn.vendor.Backend belongs there, not {', '.join(strange)}")
        names = [backend.name for backend in backends]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"backend names must be unique; given more than once: {', '.join(twice)}")
    except BROKEN as error:
        source = platform.backends if isinstance(platform.backends, str) else "given in its record"
        raise BackendUnavailable.because(
            f"the backends of platform {platform.name!r} ({source}) did not load: {cause(error)}. "
            "Repair or uninstall the package that provides it",
            platform=platform.name,
        ) from error
    return backends


def _third_party(verdict: Verdict, taken: tuple[str, ...]) -> tuple[BackendReport, Backend | None]:
    report = _verdict_report(verdict)
    if verdict.failed:
        return report, None
    if report.backend in taken:
        why = f"platform {report.platform!r} already has a backend {report.backend!r} ({', '.join(taken)} are taken)"
        return replace(report, reason=f"{why}; {report.distribution} must choose another name"), None
    try:
        backend: Backend = produced(verdict.candidate, Backend)
        if backend.name != report.backend:
            raise ValueError(f"the entry point is named {report.backend!r}, but its backend {backend.name!r}")
    except BROKEN as error:
        text = "".join(traceback.format_exception(error))
        return replace(report, reason=cause(error), traceback=text), None
    return replace(report, status="accepted"), backend


def _verdict_report(verdict: Verdict) -> BackendReport:
    candidate = verdict.candidate
    platform, backend = split_backend_name(candidate.name)
    return BackendReport(
        platform,
        backend,
        candidate.distribution,
        candidate.version,
        candidate.value,
        "skipped" if verdict.skipped else "failed",
        verdict.skipped or verdict.failed,
    )
