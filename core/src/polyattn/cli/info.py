"""`polyattn info`: what a person pastes into a bug report; whatever is broken, it says so and goes on."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from polyattn.cli import capabilities
from polyattn.cli.info_sections import sections
from polyattn.cli.installed import in_use, installed
from polyattn.cli.platform_facts import platform_facts
from polyattn.cli.ready import check_environment_choice, need_platform, need_torch
from polyattn.cli.report import show, show_json
from polyattn.cli.software import packages, software
from polyattn.cli.torch_facts import torch_facts
from polyattn.discovery import backend_reports, current_platform, platforms
from polyattn.discovery.loading import cause
from polyattn.discovery.scan import BROKEN
from polyattn.environment import VARIABLES, environment

_T = TypeVar("_T")


def info(*, device: str | None, only_capabilities: bool, as_json: bool) -> int:
    """Run the command; `device` asks for the facts of one device alone ("": the current platform's first)."""
    if device is not None:
        return _machine(device)
    if only_capabilities:
        return _capabilities(as_json)
    facts = collect()
    if as_json:
        show_json(facts)
    else:
        show(sections(facts))
    return 1 if facts["problems"] else 0


def collect() -> dict[str, Any]:
    """Everything that `info` knows; JSON-ready. Never raises for something that is broken here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for kind in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", kind)
        facts = _facts()
    facts["warnings"] = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))
    facts["problems"] = problems(facts)
    return facts


def problems(facts: dict[str, Any]) -> list[str]:
    """Why nothing can run here; empty where something can. (Whatever else is broken stands in its own section.)"""
    found = []
    if "error" in facts["torch"]:
        found += [f"torch cannot be imported: {facts['torch']['error']}", facts["torch"]["hint"]]
    if "error" in facts["current_platform"]:
        found.append(f"no platform can be used: {facts['current_platform']['error']}")
    elif not found:
        name = facts["current_platform"]["name"]
        mine = next(platform for platform in facts["in_use"] if platform["platform"] == name)
        if not any(backend["status"] == "usable" for backend in mine["backends"]):
            found.append(f"platform {name!r} has no usable backend; its own section says why")
        elif facts["current_platform"]["choice_error"]:
            found.append(facts["current_platform"]["choice_error"])
    return found


def _facts() -> dict[str, Any]:
    torch = torch_facts()  # first: where it fails, the first import tells the cause and later ones may not
    reports, detection_error = _attempt(platforms)
    devices = {report.name: report.devices or 1 for report in reports or ()}
    used = [platform_facts(platform, devices.get(platform.name, 1)) for platform in _attempt(in_use)[0] or ()]
    third_party, _ = _attempt(backend_reports)  # after the platforms' own, which load them
    return {
        "software": software(),
        "torch": torch,
        "packages": packages(),
        "environment": _environment(),
        "current_platform": _current(),
        "platforms": [report.as_dict() for report in reports or ()],
        "detection_error": detection_error,
        "in_use": used,
        "third_party_backends": [report.as_dict() for report in third_party or ()],
        "vendor_variables": _vendor_variables(),
    }


def _current() -> dict[str, Any]:
    platform, error = _attempt(lambda: current_platform.platform)
    if platform is None:
        return {"error": error}
    return {
        "name": platform.name,
        "device_type": platform.device_type,
        "collective_backend": platform.collective_backend,
        "choice_error": _attempt(lambda: check_environment_choice(platform))[1],
    }


def _environment() -> dict[str, Any]:
    _, error = _attempt(environment)
    return {"variables": {name: os.environ.get(name) for name in VARIABLES}, "error": error}


def _vendor_variables() -> dict[str, dict[str, Any]]:
    """Of every installed platform, for one that hides a device is also why its platform was declined."""
    variables: dict[str, dict[str, Any]] = {}
    for platform in _attempt(installed)[0] or ():
        for name in platform.variables:
            known = variables.setdefault(name, {"value": os.environ.get(name), "platforms": []})
            known["platforms"].append(platform.name)
    return variables


def _machine(device: str) -> int:
    need_torch()
    need_platform()
    from polyattn.cli.machines import device_here

    _, machine, _ = device_here(device or None)
    sys.stdout.write(json.dumps(machine.as_dict(), indent=2) + "\n")
    return 0


def _capabilities(as_json: bool) -> int:
    need_platform()
    matrices, errors = capabilities.installed_matrices()
    if as_json:
        show_json(matrices)
    else:
        sys.stdout.write(capabilities.markdown(matrices))
    for error in errors:
        print(f"polyattn info: {error}", file=sys.stderr)
    return 1 if errors else 0


def _attempt(ask: Callable[[], _T]) -> tuple[_T | None, str]:
    """The answer, or None and the error in one line."""
    try:
        return ask(), ""
    except BROKEN as error:
        return None, cause(error)
