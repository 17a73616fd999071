"""What `info` says of one platform in use: its devices, and its backends, usable or not and why."""

from __future__ import annotations

from typing import Any

from polyattn.cli.capabilities import matrix
from polyattn.discovery import backends_of
from polyattn.discovery.loading import cause
from polyattn.discovery.scan import BROKEN
from polyattn.door.resolution import missing_requirements
from polyattn.vendor import Backend, Machine, Platform, Request, Slot, TensorFacts


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
        machines, facts["device_errors"] = _machines(platform, devices)
        facts["devices"] = [machine.as_dict() for machine in machines]
        backends = backends_of(platform)
        first = machines[0] if machines else None
        facts["backends"] = [backend_facts(backend, platform.name, first) for backend in backends]
        facts["capabilities"] = matrix(platform.name, backends)
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
    missing = missing_requirements(backend.requires, machine)
    if missing:
        return "missing package", missing
    against: tuple[str, ...] = ()
    for slot in backend.slots:
        request = _plain_request(slot, machine)
        try:
            reasons = backend.check(request, machine) if request is not None else ()
        except BROKEN as error:
            return "error", (f"its check raised {cause(error)}",)
        if not reasons:
            return "usable", ()
        against = against or tuple(reasons)
    return "not usable", tuple(f"{reason} (asked for a plain dense call)" for reason in against)


def _plain_request(slot: Slot, machine: Machine) -> Request | None:
    """A small dense call that the slot's features cover, to hear what the backend says of the machine alone."""
    features = slot.features
    if "dense" not in features.kinds or not features.dtypes:
        return None
    dtype = "bfloat16" if "bfloat16" in features.dtypes else min(features.dtypes)
    dims = features.head_dims
    dim = 64 if dims is None or 64 in dims else max(dims)
    tensor = TensorFacts.contiguous((1, 256, 8, dim), dtype)
    return Request(tensor, tensor, tensor, device=f"{machine.device_type}:{machine.index}", scale=dim**-0.5)


def _machines(platform: Platform, devices: int) -> tuple[list[Machine], list[str]]:
    machines: list[Machine] = []
    errors: list[str] = []
    for index in range(devices):
        device = f"{platform.device_type}:{index}"
        try:
            machine = platform.machine(device)
            if not isinstance(machine, Machine):
                raise TypeError(f"Platform.machine returned {type(machine).__name__}, not a polyattn.vendor.Machine")
            machines.append(machine)
        except BROKEN as error:
            errors.append(f"{device}: {cause(error)}")
    return machines, errors
