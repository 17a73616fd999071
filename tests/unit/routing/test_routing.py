"""Routing over three fake backends: native first, cheap detours next, expensive ones last; every reason told."""

from __future__ import annotations

from typing import Any

import pytest

import polyattn as pa
from polyattn.choice import parse_choice
from polyattn.routing import Route, find_route
from polyattn.vendor import Backend, Request, StructureFacts
from tests.unit.fakes import ABSENT, DENSE_ONLY, EVERYTHING, MACHINE, VARLEN_ONLY, packed_request, platform, request


def route(asked: Request, *backends: Backend, choice: str | None = None, source: str = "argument") -> Route:
    owner = platform(*backends)
    choices = () if choice is None else (parse_choice(choice, source),)
    names = tuple(backend.name for backend in backends)
    return find_route(asked, MACHINE, owner, backends, choices, lambda: {"toy": names, "other": ("fast",)})


def test_the_first_backend_that_takes_the_request_runs_it() -> None:
    found = route(request(), DENSE_ONLY, EVERYTHING)
    assert found.name == "toy:dense_only"
    assert found.native
    assert found.reasons == {"everything": ("dense_only comes first",)}


def test_a_request_beyond_the_first_goes_on_with_its_reasons_kept() -> None:
    found = route(request(softcap=3.0), DENSE_ONLY, EVERYTHING)
    assert found.name == "toy:everything"
    assert found.reasons["dense_only"] == ("softcap is not supported",)


def test_a_head_dim_below_a_listed_one_is_padded_to_it_before_a_slower_backend_is_asked() -> None:
    assert route(request(dim=40), DENSE_ONLY, EVERYTHING).name == "pad(toy:dense_only)"
    assert route(request(dim=80), DENSE_ONLY, EVERYTHING).name == "pad(toy:dense_only)"
    found = route(request(dim=160), DENSE_ONLY, EVERYTHING)
    assert found.name == "toy:everything"
    assert "head_dim 160 not in (64, 96, 128)" in found.reasons["dense_only"]


def test_a_forced_backend_that_cannot_take_the_head_dim_says_so() -> None:
    with pytest.raises(ValueError, match=r"head_dim 160 not in \(64, 96, 128\)") as refusal:
        route(request(dim=160), DENSE_ONLY, EVERYTHING, choice="dense_only")
    assert isinstance(refusal.value, pa.UnsupportedRequest)
    assert refusal.value.backend == "dense_only"
    assert refusal.value.platform == "toy"
    assert "dense_only" in refusal.value.reasons


def test_documents_go_to_a_native_backend_before_a_loop_of_a_faster_one() -> None:
    assert route(packed_request(3), DENSE_ONLY, VARLEN_ONLY, EVERYTHING).name == "toy:everything"
    found = route(packed_request(3), DENSE_ONLY, VARLEN_ONLY)
    assert found.name == "loop(toy:dense_only)"
    assert not found.native
    assert "3 documents" in found.reasons["varlen_only"][0]
    assert found.slow


def test_one_document_is_what_a_real_and_pad_backend_takes() -> None:
    assert route(packed_request(1), VARLEN_ONLY, EVERYTHING).name == "toy:varlen_only"


def test_a_loop_needs_lengths_on_the_host_and_says_so() -> None:
    unknown = packed_request(3, structure_facts=StructureFacts(host=False, documents=3))
    with pytest.raises(pa.UnsupportedRequest, match="host"):
        route(unknown, DENSE_ONLY)


def test_grouped_heads_are_repeated_for_a_backend_without_gqa() -> None:
    assert route(request(heads=4, kv_heads=2), DENSE_ONLY).name == "repeat(toy:dense_only)"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("everything", "toy:everything"),
        ("varlen_only,everything", "toy:everything"),
        ("dense_only,everything", "toy:dense_only"),
        ("-dense_only", "toy:everything"),
        ("varlen_only,auto", "toy:dense_only"),
    ],
)
def test_a_choice_is_honoured_in_its_order(choice: str, name: str) -> None:
    assert route(request(), DENSE_ONLY, VARLEN_ONLY, EVERYTHING, choice=choice).name == name


def test_a_named_backend_goes_through_any_composition_that_makes_it_run() -> None:
    found = route(packed_request(3), DENSE_ONLY, EVERYTHING, choice="dense_only")
    assert found.name == "loop(toy:dense_only)"
    assert found.reasons["everything"] == ("not in the choice",)


def test_a_context_choice_of_another_platform_does_not_bind_and_the_route_says_so() -> None:
    found = route(request(), DENSE_ONLY, choice="fast", source="context")
    assert found.name == "toy:dense_only"
    assert any("'fast' does not bind on toy" in note for note in found.notes)


def test_a_backend_that_is_not_installed_is_an_import_error_with_the_hint() -> None:
    with pytest.raises(pa.BackendUnavailable, match="pip install toy-kernels") as refusal:
        route(request(), ABSENT, EVERYTHING, choice="absent")
    assert isinstance(refusal.value, ImportError)
    assert route(request(), ABSENT, EVERYTHING).name == "toy:everything"


def test_when_nothing_runs_every_backend_tells_why() -> None:
    with pytest.raises(pa.UnsupportedRequest) as refusal:
        route(request(quant="mxfp4"), DENSE_ONLY, VARLEN_ONLY, EVERYTHING)
    text = str(refusal.value)
    for word in ("toy:dense_only", "toy:varlen_only", "toy:everything", "mxfp4", "q[2, 8, 2, 64]"):
        assert word in text


def test_removing_everything_is_told_as_such() -> None:
    with pytest.raises(pa.UnsupportedRequest, match="removed by the choice"):
        route(request(), DENSE_ONLY, choice="-dense_only")


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (
            {
                "structure_kind": "prefix_kv",
                "structure_facts": StructureFacts(common_prefix=5, queries="same", documents=2),
            },
            "slice",
        ),
        ({"structure_kind": "spans", "structure_facts": StructureFacts(documents=2, spans=True)}, "segments"),
    ],
)
def test_structures_come_down_to_dense_calls(facts: dict[str, Any], name: str) -> None:
    assert route(request(**facts), DENSE_ONLY).name == f"{name}(toy:dense_only)"


def test_decisions_hold_one_per_backend_in_the_platforms_order() -> None:
    found = route(request(), EVERYTHING, DENSE_ONLY)
    assert [decision.backend.name for decision in found.decisions] == ["everything", "dense_only"]
