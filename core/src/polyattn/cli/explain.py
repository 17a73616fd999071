"""`polyattn explain`: which backend a call of these shapes takes, on this machine or a described one, and why."""

from __future__ import annotations

import argparse
from typing import Any

from polyattn.call import stated_choices
from polyattn.cli.asked import Asked, request_of
from polyattn.cli.failure import UsageError
from polyattn.cli.machines import device_here, platform_of, read_machine
from polyattn.cli.report import Section, show, show_json
from polyattn.discovery import platforms
from polyattn.errors import BackendUnavailable, UnsupportedRequest
from polyattn.explanation import explain_request
from polyattn.vendor import Machine, Platform


def explain(args: argparse.Namespace) -> int:
    """Run the command; 0: something can run the request, 1: nothing can, UsageError: the arguments are wrong."""
    facts = explained(args)
    if args.json:
        show_json(facts)
    else:
        show(sections(facts))
    return 0 if facts["chosen"] is not None else 1


def explained(args: argparse.Namespace) -> dict[str, Any]:
    """The explanation of the call that the arguments describe; JSON-ready."""
    asked = Asked(**{name: getattr(args, name) for name in Asked.__dataclass_fields__})
    try:
        platform, machine, device = _where(args.machine, args.device)
        request, assumed = request_of(asked, device)
        explanation = explain_request(request, platform, machine, stated_choices(args.backend, None, None))
    except (UnsupportedRequest, BackendUnavailable):
        raise
    except ValueError as error:  # a choice, or a variable of the environment, that names nothing
        raise UsageError(str(error)) from error
    if all(report.name != platform.name for report in platforms()):
        assumed += (f"no installed platform owns {device!r} tensors: torch's own SDPA serves them",)
    return {**explanation.as_dict(), "device": device, "summary": str(request), "assumed": list(assumed)}


def sections(facts: dict[str, Any]) -> list[Section]:
    """The explanation as tables."""
    machine = facts["machine"]
    where = [facts["device"], f"platform {machine['platform']}", machine["arch"], machine["name"]]
    head = [
        ("request", facts["summary"]),
        ("machine", ", ".join(text for text in where if text)),
        ("route", facts["chosen"] or "none: nothing can run it"),
    ]
    return [
        Section("explanation", [*head, *(("assumed", text) for text in facts["assumed"])]),
        Section(
            "backends",
            [(row["backend"], row["verdict"], row["reasons"]) for row in facts["backends"]],
            ("backend", "verdict", "why"),
        ),
        Section("notes", [(note,) for note in facts["notes"]]),
        Section("refusal", [(line.strip(),) for line in (facts["refusal"] or "").splitlines()]),
    ]


def _where(described: str | None, device: str | None) -> tuple[Platform, Machine, str]:
    if described is None:
        return device_here(device)
    machine = read_machine(described)
    full = machine.device_type if machine.device_type == "cpu" else f"{machine.device_type}:{machine.index}"
    if device not in (None, machine.device_type, full):
        raise UsageError(f"--device {device}: the machine of {described} is {full}")
    return platform_of(machine), machine, full
