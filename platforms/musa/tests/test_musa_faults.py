"""Public fault reports that are about choosing and detecting, by their rows, for MUSA; needs no device."""

from __future__ import annotations

import pytest

from platforms.tests.vendors import no_devices, pretend
from polyattn.vendor import Accepted, Declined, Found, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_musa import backends, detection
from polyattn_musa.order import order

PACKAGES = {"mate": "0.2.1", "flash_attn_3": "0.2.1", "torch_musa": "2.7.1", "torch": "2.7.1"}
S5000 = Machine("musa", "musa", arch="mp_31", versions=PACKAGES)


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def request(kind: str = "dense", documents: int | None = None, dim: int = 64) -> Request:
    q = TensorFacts.contiguous((9, 2, dim) if kind == "packed" else (1, 9, 2, dim), "float16")
    return Request(
        q, q, q, device="musa:0", structure_kind=kind, scale=0.125, structure_facts=StructureFacts(documents=documents)
    )


@pytest.mark.parametrize("name", ["mate", "mudnn"])
def test_1_packed_documents_run_natively_without_a_mask(name: str) -> None:
    (backend,) = (backend for backend in backends.BACKENDS if backend.name == name)
    for documents in (1, 3):
        decision = resolve(request("packed", documents), S5000, [backend])[0]
        assert isinstance(decision, Accepted)
        assert decision.slot.name == "packed"
        assert decision.slot.features.max_documents is None


@pytest.mark.parametrize("build", ["cuda", "rocm", "npu", "xpu", "cpu"])
def test_20_another_vendors_torch_is_not_taken_for_musa(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    pretend(monkeypatch, build)
    answer = detection.probe()
    assert isinstance(answer, Declined)
    assert "torch_musa" in answer.reason


@pytest.mark.parametrize(("value", "devices"), [("", 0), ("-1", 0), ("0,2", 2)])
def test_23_what_hides_devices_is_read_by_the_runtime_and_named(
    monkeypatch: pytest.MonkeyPatch, value: str, devices: int
) -> None:
    pretend(monkeypatch, "musa", devices=devices)
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", value)
    answer = detection.probe()
    assert isinstance(answer, Found if devices else Declined)
    assert f"MUSA_VISIBLE_DEVICES={value!r}" in (answer.detail if isinstance(answer, Found) else answer.reason)


def test_35_no_backend_quantises() -> None:
    for backend in backends.BACKENDS:
        assert all(not slot.features.quant and slot.features.exact for slot in backend.slots), backend.name


def test_40_head_sizes_outside_the_lists_are_named() -> None:
    for name, words in (("mate", "head_dim 520 not in (8 to 512 in steps of 8)"), ("mudnn", "head_dim 520 not in")):
        (backend,) = (backend for backend in backends.BACKENDS if backend.name == name)
        (decision,) = resolve(request("packed", 2, dim=520), S5000, [backend])
        assert words in "; ".join(getattr(decision, "reasons", ()))


def test_the_order_names_every_backend() -> None:
    assert order(request(), S5000) == tuple(backend.name for backend in backends.BACKENDS)
