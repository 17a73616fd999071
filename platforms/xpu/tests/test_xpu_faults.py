"""Public fault reports that are about choosing and detecting, by their rows, for Intel XPU; needs no device."""

from __future__ import annotations

import pytest

from platforms.tests.vendors import forbidden, no_devices, pretend
from polyattn.vendor import Accepted, Declined, Found, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_xpu import backends, detection
from polyattn_xpu.order import order

PACKAGES = {"vllm-xpu-kernels": "0.1.16.2", "torch": "2.14.0+xpu"}


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def request(kind: str = "dense", documents: int | None = None, dim: int = 64) -> Request:
    q = TensorFacts.contiguous((9, 2, dim) if kind == "packed" else (1, 9, 2, dim), "float16")
    return Request(
        q, q, q, device="xpu:0", structure_kind=kind, scale=0.125, structure_facts=StructureFacts(documents=documents)
    )


def test_1_packed_documents_run_natively_without_a_mask() -> None:
    machine = Machine("xpu", "xpu", versions=PACKAGES)
    (first, *_) = [backend for backend in backends.BACKENDS if backend.name == order(request("packed"), machine)[0]]
    for documents in (1, 3):
        decision = resolve(request("packed", documents), machine, [first])[0]
        assert isinstance(decision, Accepted)
        assert (decision.backend.name, decision.slot.name) == ("vllm_xpu", "packed")
        assert decision.slot.features.max_documents is None


@pytest.mark.parametrize("build", ["cuda", "rocm", "npu", "musa", "cpu"])
def test_20_another_vendors_torch_is_not_taken_for_xpu(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    pretend(monkeypatch, build)
    answer = detection.probe()
    assert isinstance(answer, Declined)
    assert "not an XPU build" in answer.reason


@pytest.mark.parametrize(("variable", "value", "devices"), [
    ("ZE_AFFINITY_MASK", "", 0), ("ZE_AFFINITY_MASK", "0.1,1", 2), ("ONEAPI_DEVICE_SELECTOR", "level_zero:gpu", 1),
])  # fmt: skip
def test_23_what_hides_devices_is_read_by_the_runtime_and_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, devices: int
) -> None:
    pretend(monkeypatch, "xpu", devices=devices, init=forbidden)
    monkeypatch.setenv(variable, value)
    answer = detection.probe()
    assert isinstance(answer, Found if devices else Declined)
    assert f"{variable}={value!r}" in (answer.detail if isinstance(answer, Found) else answer.reason)


def test_35_no_backend_quantises() -> None:
    for backend in backends.BACKENDS:
        assert all(not slot.features.quant and slot.features.exact for slot in backend.slots), backend.name


def test_40_head_sizes_outside_the_list_are_named() -> None:
    machine = Machine("xpu", "xpu", versions=PACKAGES)
    (vllm,) = (backend for backend in backends.BACKENDS if backend.name == "vllm_xpu")
    (decision,) = resolve(request(dim=160), machine, [vllm])
    assert "head_dim 160 not in (64, 80, 96, 128, 192, 256)" in getattr(decision, "reasons", ())


def test_the_registrys_triton_is_too_old_and_torchs_is_taken_under_either_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found, package in (("pytorch-triton-xpu", "pytorch-triton-xpu"), ("triton-xpu", "triton-xpu"), (None, None)):
        monkeypatch.setattr(backends, "installed_versions", lambda names, found=found: {found: "3.6.0"})
        assert backends._triton().requires[0].package == (package or "triton-xpu")
    (decision,) = resolve(request(), Machine("xpu", "xpu", versions={"triton-xpu": "3.3.0b1"}), [backends._triton()])
    assert "older than 3.4" in " ".join(getattr(decision, "reasons", ()))


def test_the_order_asks_packed_kernels_first_and_sdpa_before_triton_where_it_is_fused() -> None:
    machine = Machine("xpu", "xpu")
    assert order(request(), machine)[:2] == ("vllm_xpu", "sdpa")
    packed = order(request("packed"), machine)
    assert packed.index("triton") < packed.index("sdpa")
    assert {*packed} == {*order(request(), machine)} == {backend.name for backend in backends.BACKENDS}
