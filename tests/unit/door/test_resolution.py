"""The vendor's door: what `resolve` decides of three fake backends, and the words it decides with."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from polyattn.vendor import (
    API_LEVEL,
    Accepted,
    Backend,
    Capability,
    Features,
    Machine,
    Rejected,
    Request,
    Slot,
    StructureFacts,
    TensorFacts,
    capabilities_of,
    resolve,
)
from tests.unit.fakes import ABSENT, DENSE_ONLY, EVERYTHING, HALF, MACHINE, VARLEN_ONLY, packed_request, request


def decide(asked: Request, backend: Backend, machine: Machine = MACHINE) -> Accepted | Rejected:
    (decision,) = resolve(asked, machine, [backend])
    return decision


def reasons(asked: Request, backend: Backend) -> str:
    decision = decide(asked, backend)
    assert isinstance(decision, Rejected)
    return "; ".join(decision.reasons)


def test_each_fake_takes_what_it_states() -> None:
    assert isinstance(decide(request(causal=True, lse=True), DENSE_ONLY), Accepted)
    assert isinstance(decide(packed_request(1), VARLEN_ONLY), Accepted)
    assert isinstance(decide(packed_request(3), EVERYTHING), Accepted)


def test_one_decision_a_backend_in_the_given_order() -> None:
    decisions = resolve(request(), MACHINE, [EVERYTHING, DENSE_ONLY, VARLEN_ONLY])
    assert [d.backend.name for d in decisions] == ["everything", "dense_only", "varlen_only"]
    assert [type(d) for d in decisions] == [Accepted, Accepted, Rejected]


def test_every_reason_is_collected_not_only_the_first() -> None:
    text = reasons(request(dtype="float32", dim=160, kv_heads=1, softcap=5.0, grad=True), DENSE_ONLY)
    assert "dtype float32 not in (bfloat16, float16)" in text
    assert "head_dim 160 not in (64, 96, 128)" in text
    assert "1 KV heads for 2 query heads" in text
    assert "softcap is not supported" in text
    assert "gradients" in text


def test_a_real_and_pad_backend_names_the_documents_it_cannot_keep_apart() -> None:
    text = reasons(packed_request(3), VARLEN_ONLY)
    assert "3 documents" in text
    assert "at most 1" in text


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (request(window=(4, 4)), "window"),
        (request(deterministic=True), "deterministic"),
        (request(capturing=True), "graph capture"),
        (request(quant="fp8"), "quant 'fp8'"),
        (request(structure_kind="spans", structure_facts=StructureFacts(spans=True)), "'spans'"),
        (request(structure_kind="bias", structure_facts=StructureFacts(mask_grad=True)), "gradient of the mask"),
    ],
)
def test_what_a_slot_does_not_state_is_a_reason(asked: Request, word: str) -> None:
    assert word in reasons(asked, DENSE_ONLY)


def test_a_value_head_dim_of_its_own_must_be_listed_too() -> None:
    narrow = TensorFacts.contiguous((2, 8, 2, 32), "bfloat16")
    assert "value head_dim 32 differs from 64" in reasons(replace(request(), v=narrow), DENSE_ONLY)


def test_packed_with_spans_needs_both_kinds() -> None:
    asked = packed_request(1, structure_facts=StructureFacts(documents=1, spans=True))
    assert "'spans'" in reasons(asked, VARLEN_ONLY)
    assert isinstance(decide(asked, EVERYTHING), Accepted)


def test_a_slot_with_key_padding_takes_a_common_prefix_too() -> None:
    padded = Backend(
        "padded", (Slot("x:y", Features(kinds=frozenset({"key_padding"}), dtypes=frozenset({"bfloat16"}))),)
    )
    prefix = request(structure_kind="prefix_kv", structure_facts=StructureFacts(common_prefix=5))
    assert isinstance(decide(prefix, padded), Accepted)
    assert isinstance(decide(prefix, DENSE_ONLY), Rejected)


def test_the_first_slot_that_covers_the_request_is_taken() -> None:
    plain = Slot("x:plain", Features(dtypes=frozenset({"bfloat16"})))
    rich = Slot("x:rich", Features(dtypes=frozenset({"bfloat16"}), lse=True))
    backend = Backend("two", (plain, rich))
    assert decide(request(), backend).slot is plain  # type: ignore[union-attr]
    assert decide(request(lse=True), backend).slot is rich  # type: ignore[union-attr]


def slots(*features: Features) -> Backend:
    return Backend("several", tuple(Slot("x:y", one) for one in features))


BF16 = Features(dtypes=frozenset({"bfloat16"}))


def test_what_no_slot_has_is_listed_over_all_slots() -> None:
    fp8 = replace(BF16, dtypes=frozenset({"bfloat16", "float16"}), quant=frozenset({"fp8"}), exact=False)
    backend = slots(
        BF16,
        replace(fp8, kinds=frozenset({"packed"}), max_documents=1, head_dims=range(8, 257, 8)),
        replace(BF16, kinds=frozenset({"packed"}), max_documents=4),
        replace(BF16, kinds=frozenset({"paged"}), page_sizes=frozenset({16})),
        replace(BF16, kinds=frozenset({"paged"}), page_sizes=frozenset({64})),
    )
    assert "structure 'mask' is not supported, only (dense, packed, paged)" in reasons(
        request(structure_kind="mask"), backend
    )
    assert reasons(request(quant="int8"), backend) == "quant 'int8' not in (fp8)"
    assert reasons(request(dtype="float32"), backend) == "dtype float32 not in (bfloat16, float16)"
    assert reasons(packed_request(5), backend) == "5 documents asked, at most 4 supported"
    paged = request(structure_kind="paged", structure_facts=StructureFacts(page_size=32))
    assert reasons(paged, backend) == "page_size 32 not in (16, 64)", "slots of other kinds have no say in it"


def test_head_dims_of_several_slots_are_listed_as_one_range() -> None:
    backend = slots(replace(BF16, head_dims=range(8, 129, 8)), replace(BF16, head_dims=range(8, 257, 8)))
    assert reasons(request(dim=260), backend) == "head_dim 260 not in (8 to 256 in steps of 8)"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (request(grad=True, lse=True), "gradients (backward) is not supported together with LSE"),
        (
            request(grad=True, lse=True, causal=True),
            "causal is not supported; gradients (backward) is not supported together with LSE",
        ),
        (request(dtype="float16"), "dtype float16 is not supported together with quant=None"),
        (
            request(structure_kind="key_padding", grad=True),
            "gradients (backward) is not supported together with structure 'key_padding'",
        ),
        (request(quant="fp8", dim=160), "quant 'fp8' is not supported together with head_dim 160"),
        (packed_request(3), "3 documents asked, at most 1 supported ([real, pad] only)"),
    ],
)
def test_what_slots_have_only_apart_is_told_as_that(asked: Request, told: str) -> None:
    backend = slots(
        replace(BF16, kinds=frozenset({"dense", "key_padding"}), lse=True),
        replace(BF16, backward=True),
        replace(BF16, dtypes=HALF, quant=frozenset({"fp8"}), exact=False, head_dims=frozenset({64})),
        replace(BF16, kinds=frozenset({"packed"}), max_documents=1),
    )
    assert reasons(asked, backend) == told


def test_needs_that_no_single_other_slot_is_short_of_are_told_together() -> None:
    backend = slots(
        replace(BF16, lse=True, softcap=True), replace(BF16, lse=True, window=True),
        replace(BF16, softcap=True, window=True),
    )  # fmt: skip
    told = "window is not supported together with softcap and LSE"
    assert reasons(request(lse=True, softcap=5.0, window=(4, 4)), backend) == told


def test_no_refusal_is_false_of_any_slot() -> None:
    names = {"window": "window", "softcap": "softcap", "LSE": "lse"}
    every = [dict(zip(names.values(), has, strict=True)) for has in product((False, True), repeat=3)]
    asked = request(lse=True, softcap=5.0, window=(4, 4))
    for has in product(every[:-1], repeat=3):
        backend = slots(*(replace(BF16, **one) for one in has))
        for reason in reasons(asked, backend).split("; "):
            lacked, _, beside = reason.partition(" is not supported")
            together = [lacked, *filter(None, beside.removeprefix(" together with ").split(" and "))]
            assert not any(all(one[names[name]] for name in together) for one in has), (reason, has)


def test_a_missing_package_is_told_apart_and_carries_the_hint() -> None:
    decision = decide(request(), ABSENT)
    assert isinstance(decision, Rejected)
    assert decision.missing_package
    assert "toy-kernels is not installed: pip install toy-kernels" in decision.reasons[0]


@pytest.mark.parametrize(
    ("have", "takes"), [("1.9.9", False), ("2.0", True), ("2.0.1", True), ("10.0", True), ("2.1.0+cu13", True)]
)
def test_versions_are_compared_as_numbers(have: str, takes: bool) -> None:
    machine = replace(MACHINE, versions={"toy-kernels": have})
    assert isinstance(decide(request(), ABSENT, machine), Accepted) is takes


def test_a_machine_goes_through_json_and_back() -> None:
    machine = Machine("toy", "cpu", 1, "toy1", "Toy One", {"torch": "2.13"}, {"fp16": True}, {"TOY_FAST": "1"})
    assert Machine.from_dict(machine.as_dict()) == machine
    with pytest.raises(ValueError, match="unknown fields \\['colour'\\]"):
        Machine.from_dict({**machine.as_dict(), "colour": "red"})
    with pytest.raises(ValueError, match="missing fields \\['device_type', 'platform'\\]"):
        Machine.from_dict({})


def test_a_check_that_raises_is_a_reason_and_stops_nobody_else() -> None:
    def broken(request: Request, machine: Machine) -> tuple[str, ...]:
        raise KeyError("driver")

    decisions = resolve(request(), MACHINE, [replace(EVERYTHING, name="broken", check=broken), EVERYTHING])
    assert isinstance(decisions[0], Rejected)
    assert "its check raised KeyError: 'driver'" in decisions[0].reasons
    assert isinstance(decisions[1], Accepted)


def test_flags_come_from_features_alone() -> None:
    varlen = capabilities_of(VARLEN_ONLY.slots[0].features)
    assert Capability.PACKED_MASK_FREE in varlen
    assert Capability.MULTI_DOC_VARLEN not in varlen
    everything = capabilities_of(EVERYTHING.slots[0].features)
    assert Capability.MULTI_DOC_VARLEN | Capability.QUANT_INT8 | Capability.GRAPH_CAPTURE in everything
    assert Capability.QUANT_FP8 not in everything
    assert Capability.VIDEO_TILES not in everything


def test_names_and_kinds_are_checked_when_a_record_is_built() -> None:
    with pytest.raises(ValueError, match="lower case"):
        Backend("Fast-Attention", EVERYTHING.slots)
    with pytest.raises(ValueError, match="auto"):
        Backend("auto", EVERYTHING.slots)
    with pytest.raises(ValueError, match="without a forward"):
        Backend("hollow", ())
    with pytest.raises(ValueError, match="unknown \\['diagonal'\\]"):
        Features(kinds=frozenset({"diagonal"}))


def test_the_door_needs_the_standard_library_alone() -> None:
    code = "import sys, polyattn.vendor; assert 'torch' not in sys.modules; assert polyattn.vendor.API_LEVEL == 1"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert API_LEVEL == 1
