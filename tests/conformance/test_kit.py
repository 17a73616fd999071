"""What the kit itself promises: whole reports, honest refusals, tolerances that cannot be widened."""

from typing import Any

import pytest
import torch

from polyattn.reference import reference_attention
from polyattn.structures import Mask, Packed
from polyattn.testing import run_conformance
from polyattn.testing.cases import ALL_CASES, Call, Case, Maker
from polyattn.testing.check import check
from polyattn.testing.claims import refusal_problems
from polyattn.testing.compare import (
    CEILINGS,
    FLOORS,
    lse_problems,
    output_problems,
    quantised_problems,
    tolerance,
    tolerance_problems,
    without_poison,
)
from polyattn.testing.integrity import PoisonedEmpty, change_problems, contents
from polyattn.testing.targets import Target, targets, why_absent
from polyattn.vendor import Backend, Features, Found, Machine, Platform, Rejected, Request, Slot, TensorFacts


def test_a_report_counts_each_structure_and_reaches_json() -> None:
    seen: list[str] = []
    report = run_conformance(
        "cpu:sdpa",
        progress=lambda done, total, what: seen.append(f"{done}/{total} {what}"),
        structures=["block_map"],
        dtypes=[torch.float32],
    )
    assert report.ok
    assert report.as_dict()["cases"] == {"block_map": 12}
    assert report.counts == {"cpu:sdpa": {"block_map": {"native": 12, "generic": 0, "refused": 0, "failed": 0}}}
    assert len(seen) == 12
    assert seen[0] == "0/12 cpu:sdpa block_map/plain[float32]"


def test_shards_are_runs_of_neighbours_that_make_up_the_whole() -> None:
    def labels(**narrowed: Any) -> list[str]:
        seen: list[str] = []
        run_conformance("cpu:sdpa", progress=lambda done, total, what: seen.append(what), **narrowed)
        return seen

    whole = labels(structures=["block_map"])
    parts = [labels(structures=["block_map"], shard=(index, 5)) for index in range(5)]
    assert [label for part in parts for label in part] == whole
    assert all(parts)
    with pytest.raises(ValueError, match="shard"):
        run_conformance("cpu:sdpa", shard=(5, 5))


def test_a_part_of_their_names_narrows_the_cases() -> None:
    report = run_conformance("cpu:sdpa", named="quant_mxfp4_skipped")
    assert report.ok
    assert report.counts["cpu:sdpa"]["dense"] == {"native": 2, "generic": 0, "refused": 0, "failed": 0}


@pytest.mark.parametrize(
    ("platform", "backend", "told"),
    [(None, "cpu:fa9", "cpu:sdpa"), (None, "fa9", "cpu:sdpa"), ("abacus", None, "platform abacus is not installed")],
)
def test_a_name_that_nobody_has_is_an_error_that_lists_those_there_are(platform, backend, told) -> None:
    with pytest.raises(ValueError) as refusal:
        run_conformance(backend, platform)
    assert told in str(refusal.value)


def test_two_platforms_in_one_name_contradict() -> None:
    with pytest.raises(ValueError, match="platform 'cuda'"):
        targets("cuda", "cpu:sdpa")


def test_an_accepted_platform_is_not_absent() -> None:
    assert why_absent("cpu") is None


def test_a_declared_tolerance_only_tightens_and_one_above_the_ceiling_is_told() -> None:
    assert tolerance({"float32": 1e-6}, torch.float32) == 1e-6
    assert tolerance({"float32": 1.0}, torch.float32) == CEILINGS["float32"]
    assert tolerance({}, torch.bfloat16) == CEILINGS["bfloat16"]
    assert tolerance_problems({"float64": CEILINGS["float64"], "float32": 1e-6}) == []
    assert tolerance_problems({"float64": 1e-9, "float32": float("nan")}) == [
        "tolerance 1e-09 declared for float64 is above the ceiling 1e-10",
        "tolerance nan declared for float32 is above the ceiling 2e-05",
    ]


def test_the_same_case_has_the_same_numbers_and_other_cases_others() -> None:
    (target,) = targets(None, "cpu:sdpa")
    first, again, other = (
        target.maker(name, torch.float32).normal((4, 2, 8)) for name in ("dense/plain", "dense/plain", "dense/causal")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("strides", ["transposed", "fused", "stepped", "misaligned", "row_gaps", "one_head"])
def test_strides_are_as_named(strides) -> None:
    tensor = Maker(0, torch.float32, torch.device("cpu")).normal((2, 5, 3, 8), strides)
    assert tensor.shape == (2, 5, 3, 8)
    assert not tensor.is_contiguous() or tensor.storage_offset() == 1


def test_a_case_runs_in_one_thread_and_leaves_the_number_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    (target,) = targets(None, "cpu:sdpa")
    case = next(case for case in ALL_CASES if case.name == "dense/plain")
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert check(case, target, torch.float32).problems == ()
    assert told == [1, 7]


def test_uninitialised_memory_is_poisoned_within_and_only_within() -> None:
    kept = torch.zeros(3)
    with PoisonedEmpty():
        torch.empty(3, out=kept)
        made = [torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(1).new_empty(3), torch.empty(3).half()]
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
        assert torch.zeros(3).eq(0).all()
    assert all(tensor.isnan().all() for tensor in (kept, *made))
    # The memory of a new tensor may hold anything; that of a given one shows that nobody wrote to it.
    kept = torch.zeros(3)
    torch.empty(3, out=kept)
    assert kept.eq(0).all()


def test_a_change_beside_a_view_and_a_change_of_the_structure_show() -> None:
    wide = torch.zeros(2, 4, 1, 8)
    structure = Packed.from_lengths([4])
    call = Call(wide[0], torch.zeros(4, 1, 8), torch.zeros(4, 1, 8), structure)
    before = contents(call)
    assert change_problems(before, call) == []
    wide[1, 0] = 1.0
    structure.cu_q[1] = 3
    assert change_problems(before, call) == [
        "q was modified",
        "structure.cu_q was modified",
        "structure.cu_k was modified",
    ]


def test_a_nan_written_over_in_a_structure_shows() -> None:
    mask = Mask.keys(torch.zeros(2))
    call = Call(torch.zeros(1, 1, 1, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), mask)
    mask.tensor[..., 1] = torch.nan
    before = contents(call)
    assert change_problems(before, call) == []
    mask.tensor[..., 1] = 3.0
    assert change_problems(before, call) == ["structure.tensor was modified"]


def test_what_is_wrong_with_an_output_is_said() -> None:
    want, lse, like = torch.zeros(1, 2, 1, 4).double(), torch.tensor([[[0.0, -torch.inf]]]).double(), torch.zeros(1)
    got = torch.zeros(1, 2, 1, 4)
    assert output_problems(got, want, lse, like, 1e-3) == []
    assert "shape" in output_problems(got[:, :1], want, lse, like, 1e-3)[0]
    assert "dtype" in output_problems(got.double(), want, lse, like, 1e-3)[0]
    got[0, 1] = 1e-9
    assert output_problems(got, want, lse, like, 1e-3) == ["output: 1 rows that see no key are not 0"]
    got[0, 0] = torch.nan
    assert "NaN" in output_problems(got, want, lse, like, 1e-3)[0]


def test_what_is_wrong_with_an_lse_is_said() -> None:
    want, like = torch.tensor([[1.0, -torch.inf]]).double(), torch.zeros(1)
    assert lse_problems(want.float(), want, like, 1e-5) == []
    assert "none" in lse_problems(None, want, like, 1e-5)[0]
    assert "dtype" in lse_problems(want, want, like, 1e-5)[0]
    assert "-inf" in lse_problems(torch.tensor([[1.0, 0.0]]), want, like, 1e-5)[0]
    assert "off by more" in lse_problems(torch.tensor([[1.4, -torch.inf]]), want, like, 1e-5)[0]


def test_what_is_wrong_with_a_quantised_output_is_said() -> None:
    want = torch.randn(2, 500, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lse, like = torch.zeros(2, 2, 500, dtype=torch.float64), torch.zeros(1)

    def told(got: torch.Tensor) -> str:
        return "; ".join(quantised_problems(got.float(), want, lse, like, 0.1, 0.01))

    assert told(want * 1.05) == ""
    assert "its error is 0.2 of its norm, more than 0.1" in told(want * 1.2)
    assert "nothing was quantised" in told(want * 1.001)
    one_row = want * 1.05
    one_row[1, 3] = -one_row[1, 3]
    assert "row [1, 3]" in told(one_row)
    assert "NaN" in told(want.where(want < 2, torch.nan))
    assert quantised_problems(want.float(), want, lse, like, 0.1, 0.0) == []


def test_each_format_has_its_ceiling_and_a_floor_far_below_it() -> None:
    assert set(FLOORS) == {name for name in CEILINGS if "float" not in name}
    assert all(FLOORS[name] < CEILINGS[name] / 5 for name in FLOORS)
    assert tolerance({"fp8": 0.05}, "fp8") == 0.05
    assert tolerance({"fp8": 0.5}, "fp8") == CEILINGS["fp8"]
    assert tolerance_problems({"int8": 0.5}) == ["tolerance 0.5 declared for int8 is above the ceiling 0.08"]


def test_only_what_is_nan_by_right_is_left_out_of_the_comparison() -> None:
    got, want = torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([1.0, torch.nan, 3.0])
    kept, wanted = without_poison(got, want)
    assert kept[:2].tolist() == wanted[:2].tolist() == [1.0, 0.0]
    assert kept[2].isnan()
    assert wanted[2] == 3.0


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.poisoned], ids=lambda case: case.name)
def test_a_poisoned_case_has_rows_that_see_nan_and_rows_that_do_not(case: Case) -> None:
    (target,) = targets(None, "cpu:sdpa")
    call = case.build(target.maker(case.name, torch.float32))
    out = reference_attention(call.q, call.k, call.v, **call.arguments)
    poisoned = out.isnan().flatten(-2).any(-1)
    assert 0.1 < poisoned.double().mean() < 0.9


TAKES_IT, TAKES_NOTHING = Features(dtypes=frozenset({"float32"})), Features()


def refusal(features: Features, check: Any) -> list[str]:
    backend = Backend("toy", (Slot("toy:attend", features),), check=check)
    facts = TensorFacts.contiguous((1, 4, 2, 8), "float32")
    decision = Rejected(backend, ("out of order",))
    platform = Platform("toy", "cpu", 1, lambda: Found(), lambda device: Machine("toy", "cpu"), (backend,))
    return refusal_problems(decision, Request(facts, facts, facts), Target(platform, backend))


def test_a_refusal_is_wrong_where_features_claim_the_request_and_the_check_does_not_object() -> None:
    assert "claims all that is asked" in refusal(TAKES_IT, lambda request, machine: ())[0]
    assert refusal(TAKES_IT, lambda request, machine: ("out of order",)) == []
    assert refusal(TAKES_NOTHING, lambda request, machine: ()) == []
    assert "ZeroDivisionError" in refusal(TAKES_IT, lambda request, machine: (1 // 0,))[0]


def test_cases_reach_what_the_brief_of_the_kit_names() -> None:
    names = {case.name.partition("/")[2] for case in ALL_CASES}
    wanted = {f"head_dim_{size}" for size in (40, 64, 72, 80, 128)} | {
        "gqa", "mqa", "v_dim_narrower", "v_dim_wider", "strides_transposed", "strides_fused", "strides_stepped",
        "strides_expanded_kv", "causal_more_keys", "causal_more_queries", "rows_of_nothing", "empty_documents_between",
        "row_of_padding", "single_token", "spare_rows", "garbage", "bias_minus_infinity", "bias_lowest",
        "rank4_per_head", "boundaries_int64", "window_left", "softcap", "scale_zero", "scale_given", "out",
        "deterministic", "plain+lse", "plain+grad", "across_blocks",
        "lse+grad", "rows_of_nothing+lse+grad", "document_without_keys+lse+grad", "compiled", "compiled+grad",
        "compiled_bias", "compiled_one_length", "autocast", "autocast+grad", "compiled_autocast",
        "quant_fp8", "quant_int8+lse", "quant_fp8_garbage", "quant_fp8_loud_padding", "quant_int8_skipped_layer",
        "captured", "captured_capacity", "captured_cold", "streams", "unsynced", "unsynced_on_device",
        "garbage_across_blocks", "poisoned_sample", "poisoned_document", "poisoned_row",
    }  # fmt: skip
    assert wanted <= names
