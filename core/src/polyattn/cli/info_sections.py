"""`info`'s facts as tables."""

from __future__ import annotations

from typing import Any

from polyattn.cli import capabilities
from polyattn.cli.report import Section

Facts = dict[str, Any]
Rows = list[tuple[str, ...]]


def sections(facts: Facts) -> list[Section]:
    """Every section, in the order of a bug report: what this is, what was found, what can run, what influences it."""
    used = facts["in_use"]
    return [
        Section("problems", [(text,) for text in facts["problems"]]),
        Section("software", _software(facts)),
        Section("packages", list(facts["packages"].items())),
        Section(
            "platforms",
            [_platform(report) for report in facts["platforms"]],
            ("platform", "status", "distribution", "device type", "priority", "devices", "why"),
        ),
        Section(
            "devices",
            [row for platform in used for row in _devices(platform)],
            ("device", "platform", "architecture", "name"),
        ),
        *(section for platform in used for section in _machine(platform)),
        Section(
            "backends",
            [row for platform in used for row in _backends(platform)],
            ("backend", "status", "requires", "why"),
        ),
        Section(
            "third-party backends",
            [_third_party(report) for report in facts["third_party_backends"]],
            ("backend", "status", "distribution", "why"),
        ),
        *capabilities.sections([platform["capabilities"] for platform in used]),
        Section("environment", _environment(facts)),
        *_vendor_variables(facts),
        Section("warnings", [(text,) for text in facts["warnings"]]),
        *_tracebacks(facts),
    ]


def _software(facts: Facts) -> Rows:
    torch, current = facts["torch"], facts["current_platform"]
    rows = list(facts["software"].items())
    if "error" in torch:
        rows.append(("torch", f"cannot be imported: {torch['error']}"))
    else:
        rows.append(("torch", torch["version"]))
        rows.append(("torch build", ", ".join(f"{name} {value}" for name, value in torch["build"].items())))
    rows += [("torch loads", extension) for extension in torch["extensions"]]
    rows.append(("current platform", current.get("name") or f"none: {current['error']}"))
    if facts["detection_error"]:
        rows.append(("detection", facts["detection_error"]))
    return rows


def _platform(report: Facts) -> tuple[str, ...]:
    return (
        report["name"],
        report["status"],
        f"{report['distribution']} {report['version']}",
        report["device_type"] or "",
        "" if report["priority"] is None else str(report["priority"]),
        "" if report["devices"] is None else str(report["devices"]),
        "; ".join(text for text in (report["reason"], report["detail"]) if text),
    )


def _devices(platform: Facts) -> Rows:
    found: Rows = [
        (f"{m['device_type']}:{m['index']}", platform["platform"], m["arch"] or "unknown", m["name"] or "unknown")
        for m in platform["devices"]
    ]
    broken: Rows = [
        (device, platform["platform"], "error", error)
        for device, _, error in (text.partition(": ") for text in platform["device_errors"])
    ]
    return found + broken


def _machine(platform: Facts) -> list[Section]:
    if not platform["devices"]:
        return []
    machine = platform["devices"][0]
    named = {**machine["versions"], **{f"build: {name}": value for name, value in machine["build_facts"].items()}}
    return [Section(f"machine facts of {platform['platform']}", [(name, str(value)) for name, value in named.items()])]


def _backends(platform: Facts) -> Rows:
    if platform["error"]:
        return [(f"{platform['platform']}:*", "error", "", platform["error"])]
    return [
        (backend["backend"], backend["status"], ", ".join(backend["requires"]), "; ".join(backend["reasons"]))
        for backend in platform["backends"]
    ]


def _third_party(report: Facts) -> tuple[str, ...]:
    name = f"{report['platform']}:{report['backend']}"
    return name, report["status"], f"{report['distribution']} {report['version']}", report["reason"]


def _environment(facts: Facts) -> Rows:
    given, error = facts["environment"]["variables"], facts["environment"]["error"]
    rows: Rows = [(name, "not set" if text is None else repr(text)) for name, text in given.items()]
    return [*rows, ("error", error)] if error else rows


def _vendor_variables(facts: Facts) -> list[Section]:
    """Those that are set by value, the others by name, a line a platform."""
    given: Rows = []
    unset: dict[str, list[str]] = {}
    for name, known in facts["vendor_variables"].items():
        if known["value"] is not None:
            given.append((name, repr(known["value"]), ", ".join(known["platforms"])))
        else:
            unset.setdefault(", ".join(known["platforms"]), []).append(name)
    return [
        Section("vendors' variables", given),
        Section("vendors' variables that are not set", [(whose, ", ".join(names)) for whose, names in unset.items()]),
    ]


def _tracebacks(facts: Facts) -> list[Section]:
    platforms = {f"platform {r['name']} of {r['distribution']}": r["traceback"] for r in facts["platforms"]}
    backends = {f"backend {r['platform']}:{r['backend']}": r["traceback"] for r in facts["third_party_backends"]}
    return [
        Section(f"traceback of {name}", [(line,) for line in text.splitlines()])
        for name, text in {**platforms, **backends}.items()
        if text
    ]
