"""What `info` says of one platform in use: its devices, and its backends, usable or not and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from polyattn.cli.capabilities import matrix
from polyattn.discovery import backends_of
from polyattn.discovery.loading import cause
from polyattn.discovery.scan import BROKEN
from polyattn.machine import machine_of
from polyattn.usable import usable
from polyattn.vendor import Backend, Machine, Platform


def platform_facts(platform: Platform, devices: int) -> dict[str, Any]:
    """The platform's facts, JSON-ready; what cannot be read is there as an error."""
    facts: dict[str, Any] = {
        "platform": platform.name,
        "device_type": platform.device_type,
        "devices": [],
        "device_errors": [],
        "backends": [],
        "capabilities": {"platform": platform.name, "backends": {}},
        "error": "",
    }
    try:
        backends, facts["error"] = _backends(platform)
        # A machine's facts hold what its backends require; without backends, the platform's own are left.
        facts_of = platform.machine if backends is None else partial(machine_of, platform)
        machines, facts["device_errors"] = _machines(platform.device_type, devices, facts_of)
        facts["devices"] = [machine.as_dict() for machine in machines]
        first = machines[0] if machines else None
        facts["backends"] = [backend_facts(backend, platform.name, first) for backend in backends or ()]
        facts["capabilities"] = matrix(platform.name, backends or ())
    except BROKEN as error:
        facts["error"] = cause(error)
    return facts


def backend_facts(backend: Backend, platform: str, machine: Machine | None) -> dict[str, Any]:
    """Whether the backend can be used on this machine; "unknown" where the machine's facts could not be read."""
    status, reasons = _status(backend, machine)
    return {
        "backend": f"{platform}:{backend.name}",
        "status": status,
        "reasons": list(reasons),
        "requires": [" >= ".join(filter(None, (need.package, need.version))) for need in backend.requires],
        "slots": [slot.name for slot in backend.slots],
    }


def _status(backend: Backend, machine: Machine | None) -> tuple[str, tuple[str, ...]]:
    if machine is None:
        return "unknown", ("the machine's facts could not be read",)
    try:
        return usable(backend, machine)
    except BROKEN as error:  # what no resolver expects, such as an import that ends the process
        return "error", (f"it cannot be asked: {cause(error)}",)


def _backends(platform: Platform) -> tuple[tuple[Backend, ...] | None, str]:
    """The platform's backends, or None and why they cannot be had."""
    try:
        return backends_of(platform), ""
    except BROKEN as error:
        return None, cause(error)


def _machines(device_type: str, devices: int, facts_of: Callable[[str], Machine]) -> tuple[list[Machine], list[str]]:
    """The machines behind so many devices, and a line for each whose facts cannot be read."""
    machines: list[Machine] = []
    errors: list[str] = []
    for index in range(devices):
        device = f"{device_type}:{index}"
        try:
            machines.append(facts_of(device))
        except BROKEN as error:
            errors.append(f"{device}: {cause(error)}")
    return machines, errors
