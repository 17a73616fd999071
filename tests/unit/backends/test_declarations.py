"""What the core's backends claim: names, order, slots that exist, refusals with reasons."""

import importlib

import pytest
import torch

from polyattn.backends import cpu, generic
from polyattn.vendor import Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve

MACHINE = Machine("cpu", "cpu")
DENSE = TensorFacts.contiguous((2, 8, 4, 64), "float32")
ROWS = TensorFacts.contiguous((16, 4, 64), "float32")
EVERY = (*cpu.BACKENDS, *generic.generic_backends())


def decide(request, backends=cpu.BACKENDS):
    return {decision.backend.name: decision for decision in resolve(request, MACHINE, backends)}


@pytest.mark.parametrize("backends", [cpu.BACKENDS, generic.generic_backends()])
def test_names(backends):
    assert [backend.name for backend in backends] == ["sdpa", "blocked"]
    assert generic.BACKENDS is generic.generic_backends()


@pytest.mark.parametrize("slot", [slot for backend in EVERY for slot in backend.slots], ids=lambda slot: slot.call)
def test_every_slot_exists(slot):
    module, _, name = slot.call.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("changes", "slot"), [
    ({}, "sdpa_plain"),
    ({"grad": True, "deterministic": True}, "sdpa_plain"),
    ({"causal": True}, "sdpa_dense"),
    ({"lse": True}, "sdpa_dense"),
    ({"k": TensorFacts.contiguous((2, 8, 2, 64), "float32")}, "sdpa_dense"),
    ({"v": TensorFacts.contiguous((2, 8, 4, 32), "float32")}, "sdpa_dense"),
    ({"structure_kind": "key_padding"}, "sdpa_key_padding"),
    ({"structure_kind": "prefix_kv", "window": (2, 2)}, "sdpa_prefix_kv"),
    ({"structure_kind": "bias"}, "sdpa_mask"),
    ({"structure_kind": "spans", "structure_facts": StructureFacts(spans=True)}, "sdpa_spans"),
    ({"structure_kind": "packed", "window": (2, 0), "q": ROWS, "k": ROWS, "v": ROWS}, "sdpa_packed"),
    ({"structure_kind": "packed", "structure_facts": StructureFacts(spans=True), "q": ROWS}, "sdpa_packed"),
    ({"structure_kind": "paged", "structure_facts": StructureFacts(spans=True, page_size=3)}, "sdpa_paged"),
])  # fmt: skip
def test_the_first_slot_that_has_it_all(changes, slot):
    given = {"q": DENSE, "k": DENSE, "v": DENSE, **changes}
    decision = decide(Request(**given))["sdpa"]
    assert isinstance(decision, Accepted)
    assert decision.slot.name == slot


@pytest.mark.parametrize("kind", ["packed", "paged"])
@pytest.mark.parametrize("backends", [cpu.BACKENDS, generic.BACKENDS])
def test_lengths_on_the_device_are_refused_by_what_runs_piece_by_piece(kind, backends):
    request = Request(ROWS, ROWS, ROWS, structure_kind=kind, structure_facts=StructureFacts(host=False))
    decisions = decide(request, backends)
    assert isinstance(decisions["sdpa"], Rejected)
    assert "on the host" in decisions["sdpa"].reasons[0]
    assert isinstance(decisions["blocked"], Accepted)


def test_spans_need_a_table_on_the_host():
    facts = StructureFacts(host=False, spans=True)
    decisions = decide(Request(ROWS, ROWS, ROWS, structure_kind="paged", structure_facts=facts))
    assert all(isinstance(decision, Rejected) for decision in decisions.values())
    assert "spans" in decisions["blocked"].reasons[0]


@pytest.mark.parametrize("changes", [{"softcap": 1.0}, {"structure_facts": StructureFacts(mask_grad=True)}])
def test_what_only_plain_matmul_does(changes):
    kind = "bias" if "structure_facts" in changes else "dense"
    decisions = decide(Request(DENSE, DENSE, DENSE, structure_kind=kind, **changes))
    assert isinstance(decisions["sdpa"], Rejected)
    assert isinstance(decisions["blocked"], Accepted)


def test_an_unknown_device_promises_neither_lse_nor_determinism_of_sdpa():
    for changes in ({"lse": True}, {"deterministic": True}):
        decisions = decide(Request(DENSE, DENSE, DENSE, **changes), generic.BACKENDS)
        assert isinstance(decisions["sdpa"], Rejected)
        assert isinstance(decisions["blocked"], Accepted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_float_has_a_tolerance(dtype):
    request = Request(*(TensorFacts.contiguous((1, 4, 2, 8), dtype) for _ in range(3)))
    for backend in EVERY:
        assert backend.tolerances[dtype] < torch.finfo(getattr(torch, dtype)).eps * 1e8
        assert isinstance(decide(request, [backend])[backend.name], Accepted)
