"""How the kit judges what is around a call: graphs, streams and a mode that refuses waiting, acted out on the CPU."""

import pytest
import torch

from polyattn.testing import captured
from polyattn.testing.cases import ALL_CASES, Case
from polyattn.testing.check import Outcome, check
from polyattn.testing.claims import unaccepted_claims
from polyattn.testing.targets import Target, targets
from tests.conformance import surrounded_slots
from tests.conformance.acted_out import staged

CAPTURED = [
    case
    for case in ALL_CASES
    if case.within == "capture" and case.quant is None and case.structure in ("dense", "key_padding", "packed")
]
COLD = [case for case in ALL_CASES if case.within == "cold_capture" and case.structure in ("key_padding", "packed")]


def named(name: str) -> Case:
    (case,) = (case for case in ALL_CASES if case.name == name)
    return case


def judged(backend: str, case: Case) -> Outcome:
    with staged(surrounded_slots.backend(backend)) as target:
        return check(case, target, torch.float32)


@pytest.mark.parametrize("case", CAPTURED, ids=lambda case: case.name)
def test_right_slots_replay_right(case) -> None:
    assert judged("right", case) == Outcome("native")


@pytest.mark.parametrize("case", COLD, ids=lambda case: case.name)
def test_a_cold_capture_is_right_where_it_raises_and_names_the_way_out(case) -> None:
    assert judged("right", case) == Outcome("native")


@pytest.mark.parametrize(("fault", "case", "words"), [
    ("bakes_lengths", "packed/captured_capacity", "output"),
    ("bakes_lengths", "packed/captured_capacity_causal+lse", "LSE"),
    ("bakes_keys", "dense/captured", "output"),
    ("writes_its_inputs", "dense/captured", "q was modified"),
])  # fmt: skip
def test_a_fault_that_only_a_replay_shows_is_caught(fault, case, words) -> None:
    assert words in "; ".join(judged(fault, named(case)).problems)


def test_what_the_graph_does_not_hold_shows_as_nan(monkeypatch) -> None:
    with staged(surrounded_slots.backend("right")) as target:
        record = captured.record
        monkeypatch.setattr(captured, "record", lambda device, call: (record(device, call)[0], lambda: None))
        assert "NaN" in check(named("dense/captured"), target, torch.float32).problems[0]


def test_a_cold_capture_that_goes_through_or_gives_no_way_out_is_wrong(monkeypatch) -> None:
    def fail(device, call):
        raise RuntimeError("operation not permitted when stream is capturing")

    with staged(surrounded_slots.backend("right")) as target:
        for record, words in ((lambda device, call: (call(), None), "went through"), (fail, "without naming")):
            monkeypatch.setattr(captured, "record", record)
            assert words in check(named("packed/captured_cold"), target, torch.float32).problems[0]


def test_capture_is_a_claim_to_be_shown_where_the_device_has_graphs() -> None:
    dense = [case for case in ALL_CASES if case.structure == "dense" and case.quant is None]
    eager = [case for case in dense if "capture" not in case.within]
    backend = surrounded_slots.backend("right")
    with staged(backend) as target:
        assert "capture" in unaccepted_claims(target, eager)
        assert "capture" not in unaccepted_claims(target, dense)
    assert "capture" not in unaccepted_claims(Target(targets(None, "cpu:sdpa")[0].platform, backend), eager)


AROUND = [
    case
    for case in ALL_CASES
    if case.within in ("streams", "no_sync") and case.structure in ("dense", "packed") and case.quant is None
]


@pytest.mark.parametrize("case", AROUND, ids=lambda case: case.name)
def test_right_slots_are_right_on_two_streams_and_where_nothing_may_be_waited_for(case) -> None:
    outcome = judged("right", case)
    assert outcome == Outcome("refused" if case.grad else "native")
    assert surrounded_slots.sync_mode == "default"


def test_waiting_in_a_second_call_is_caught() -> None:
    assert "synchronizing" in judged("waits", named("dense/unsynced")).problems[0]
    assert judged("waits", named("dense/plain")) == Outcome("native")
    assert surrounded_slots.sync_mode == "default"


def test_what_one_stream_keeps_of_the_other_is_caught() -> None:
    assert "output" in "; ".join(judged("bakes_keys", named("dense/streams")).problems)


def test_the_cpu_has_neither_graphs_nor_streams_nor_a_mode_that_refuses_waiting() -> None:
    (target,) = targets(None, "cpu:sdpa")
    for within in ("capture", "cold_capture", "streams", "no_sync"):
        assert not target.surrounds(within)
        assert all(target.dtypes_of(case) == () for case in ALL_CASES if case.within == within)
