"""What `polyattn info` and `supports` say of each vendor, against the resolver's answers to the kit's calls.

The machines are described: no device is needed, and no package of a vendor.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from platforms.tests.vendors import detection_of
from polyattn.plain_calls import Heads
from polyattn.usable import supports, usable
from polyattn.vendor import Accepted, Backend, Capability, Machine, capabilities_of, resolve, unmet
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


KINDS = ("whole", "old device", "unread packages", "nothing installed")


def of_kind(vendor: str, kind: str) -> Machine:
    machines = {
        "whole": described(vendor),
        "old device": described(vendor, arch=OLD[vendor]),
        "unread packages": described(vendor, **UNREAD),
        "nothing installed": Machine(vendor, detection_of(vendor).DEVICE_TYPE),
    }
    return machines[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_usable_is_what_the_resolver_accepts_something_of(vendor: str, kind: str) -> None:
    machine = of_kind(vendor, kind)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_has_flags_where_it_is_usable_and_all_that_it_claims_on_a_whole_machine(
    vendor: str, kind: str
) -> None:
    machine = of_kind(vendor, kind)
    for backend in backends_of(vendor):
        claimed = [flag for flag in Capability if any(flag in capabilities_of(slot.features) for slot in backend.slots)]
        told = {flag for flag in claimed if supports(flag, [backend], machine)}
        assert bool(told) == (usable(backend, machine)[0] == "usable"), backend.name
        if kind == "whole" and told:
            assert told == set(claimed), backend.name


def test_a_flag_is_asked_for_a_layers_own_heads_and_dtype() -> None:
    pytest.importorskip("polyattn_rocm")
    (aiter,) = (backend for backend in backends_of("rocm") if backend.name == "aiter")
    whole, unloaded = described("rocm", arch="gfx942"), replace(described("rocm", arch="gfx942"), name="AMD MI300A")
    at_128, at_64 = Heads(8, 8, 128), Heads(8, 8, 64)
    lse = Capability.LSE
    assert supports(lse, [aiter], whole, at_128, "bfloat16")
    assert not supports(lse, [aiter], unloaded, at_128, "bfloat16")
    assert supports(lse, [aiter], unloaded, at_128, "float16")
    assert supports(lse, [aiter], unloaded, at_64, "bfloat16")
    assert not supports(lse | Capability.SOFTCAP, [aiter], whole, at_128, "bfloat16"), "its assembly reads none"
    assert not supports(lse, [aiter], whole, Heads(8, 8, 60), "bfloat16")


def test_a_question_is_asked_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polyattn_rocm")
    (triton,) = (backend for backend in backends_of("rocm") if backend.name == "flash_attn_triton")
    without, with_it = described("rocm"), described("rocm", env={TRITON_ROUTE: "TRUE"})
    assert not supports(Capability.LSE, [triton], without)
    assert supports(Capability.LSE, [triton], with_it), "of another machine"
    monkeypatch.setattr("polyattn.usable.resolve", lambda *_: 1 / 0)
    assert supports(Capability.LSE, [triton], described("rocm", env={TRITON_ROUTE: "TRUE"}))
    with pytest.raises(ZeroDivisionError):
        supports(Capability.LSE, [triton], without)
