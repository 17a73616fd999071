"""What `polyattn info` calls usable of each vendor, against the resolver's answers to what the conformance kit asks.

The machines are described: no device is needed, and no package of a vendor.
"""

from __future__ import annotations

from importlib import import_module

import pytest

from platforms.tests.vendors import detection_of
from polyattn.cli.usable import usable
from polyattn.vendor import Accepted, Backend, Machine, resolve, unmet
from tests.emulators.kit_requests import kit_requests

#: An architecture that few backends serve, by vendor; "" is one that is not known, which is given the benefit of doubt.
OLD = {"cuda": "sm_75", "rocm": "gfx1100", "npu": "310P", "xpu": "0x0300000000000000", "musa": "mp_21"}
#: Releases of packages that no check refuses, and some that one does; of others any will do.
READ = {"flash-attn": "2.8.3", "vllm-xpu-kernels": "0.1.16.2", "intel-extension-for-pytorch": "2.8.10+xpu"}
UNREAD = {"flash-attn": "2.9", "vllm-xpu-kernels": "0.2.0", "intel-extension-for-pytorch": "2.8.0"}
TRITON_ROUTE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


def backends_of(vendor: str) -> tuple[Backend, ...]:
    found: tuple[Backend, ...] = import_module(f"polyattn_{vendor}.backends").BACKENDS
    return found


def described(vendor: str, *, arch: str = "", env: dict[str, str] | None = None, **versions: str) -> Machine:
    """A machine with all that the vendor's backends require."""
    every = {need.package: "9" for backend in backends_of(vendor) for need in backend.requires} | READ
    device_type = detection_of(vendor).DEVICE_TYPE
    return Machine(vendor, device_type, arch=arch, versions={"torch": "2.14.0", **every, **versions}, env=env or {})


def judge(backend: Backend, machine: Machine) -> str:
    """What info says, once it is known to be what the resolver says of every call that a slot would take."""
    status, reasons = usable(backend, machine)
    assert (status == "usable") != bool(reasons)
    for request in kit_requests(f"{machine.device_type}:0") if reasons else ():
        if all(unmet(slot.features, request) for slot in backend.slots):
            continue
        (decision,) = resolve(request, machine, [backend])
        assert not isinstance(decision, Accepted), request
        assert set(reasons) <= set(decision.reasons), (request, decision.reasons)
    return status


@pytest.mark.parametrize("kind", ["whole", "old device", "unread packages", "nothing installed"])
def test_usable_is_what_the_resolver_accepts_something_of(vendor: str, kind: str) -> None:
    machine = {
        "whole": described(vendor),
        "old device": described(vendor, arch=OLD[vendor]),
        "unread packages": described(vendor, **UNREAD),
        "nothing installed": Machine(vendor, detection_of(vendor).DEVICE_TYPE),
    }[kind]
    told = {backend.name: judge(backend, machine) for backend in backends_of(vendor)}
    assert told["sdpa"] == told["blocked"] == "usable"
    required = {backend.name for backend in backends_of(vendor) if backend.requires}
    lacking = {name for name, status in told.items() if status == "missing package"}
    assert lacking == (required if kind == "nothing installed" else set())


@pytest.mark.parametrize("value", [None, "TRUE", "FALSE"])
def test_a_variable_decides_which_of_flash_attns_kernels_are_usable(value: str | None) -> None:
    pytest.importorskip("polyattn_rocm")
    env = {} if value is None else {TRITON_ROUTE: value}
    machine = described("rocm", env=env)
    told = {backend.name: judge(backend, machine) for backend in backends_of("rocm")}
    usual, by_triton = ("not usable", "usable") if value == "TRUE" else ("usable", "not usable")
    assert (told["flash_attn"], told["flash_attn_triton"]) == (usual, by_triton)


@pytest.mark.parametrize(("torch", "status"), [("2.8.0+xpu", "usable"), ("2.14.0+xpu", "not usable")])
def test_torchs_version_decides_whether_ipex_is_usable(torch: str, status: str) -> None:
    pytest.importorskip("polyattn_xpu")
    machine = described("xpu", torch=torch)
    (ipex,) = (backend for backend in backends_of("xpu") if backend.name == "ipex")
    assert judge(ipex, machine) == status
