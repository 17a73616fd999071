"""`polyattn plan`: what strategies over many ranks would cost, by the model, in tables that say what the JSON says."""

from __future__ import annotations

import pytest
import torch

from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.cli.plan import ERROR, why_first, work_of
from polyattn.distributed.cost import Cost, Ranks, Strategy, Work, alone
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.prices import price

KINDS = {"ulysses", "ring", "gather", "ulysses x ring", "ulysses x gather"}


def test_it_plans_three_shapes_for_8_64_and_512_ranks(polyattn):
    facts = polyattn("plan", "--json").json
    assert list(facts["shapes"]) == ["flux", "wan480", "wan720"]
    for shape in facts["shapes"].values():
        assert [ranks["total"] for ranks in shape["ranks"]] == [8, 64, 512]
        assert {one["kind"] for one in shape["ranks"][0]["strategies"]} == KINDS


def test_numbers_are_those_of_the_cost_model(polyattn):
    facts = polyattn("plan", "--shape", "wan480", "--ranks-per-host", "4", "--hosts", "2", "--json").json
    work, ranks = Work(32760, 40, 128), Ranks(4, 2)
    (planned,) = facts["shapes"]["wan480"]["ranks"]
    for one in planned["strategies"]:
        cost = price(H200, work, ranks, Strategy(**one["degrees"]))
        assert one["milliseconds"] == pytest.approx(cost.seconds * 1e3, rel=1e-4)
        assert one["speed_up"] == pytest.approx(alone(H200, work).seconds / cost.seconds, rel=1e-3)
        assert (one["sent_bytes_a_rank"], one["bytes_beyond_shard"]) == (round(cost.sent), round(cost.memory))


def test_the_fastest_is_first_and_the_table_says_so(polyattn):
    options = ("plan", "--shape", "wan720", "--hosts", "8")
    (planned,) = polyattn(*options, "--json").json["shapes"]["wan720"]["ranks"]
    times = [one["milliseconds"] for one in planned["strategies"]]
    assert times == sorted(times)
    assert planned["fastest"] == planned["strategies"][0]["strategy"]
    text = polyattn(*options).out
    winner = next(line for line in text.splitlines() if line.strip().startswith("wan720  64"))
    assert planned["fastest"] in winner
    assert planned["why"] in winner
    assert "wan720 on 64 ranks (8 x 8)" in text
    for kind in KINDS - {"ulysses"}:
        best = next(one for one in planned["strategies"] if one["kind"] == kind)
        assert any(line.split("  ")[1:2] == [best["strategy"]] for line in text.splitlines()), kind


def test_what_cannot_be_is_told_with_its_reason(polyattn):
    text = polyattn("plan", "--shape", "flux", "--hosts", "8").out
    assert "24 heads leave 40 of 64 ranks without one, and 2 more divisions likewise" in text
    refused = polyattn("plan", "--shape", "flux", "--hosts", "8", "--json").json["shapes"]["flux"]["ranks"][0][
        "refused"
    ]
    assert set(refused) == {"ulysses 64", "ulysses 32 x ring 2", "ulysses 32 x gather 2"}


def test_a_reader_learns_what_is_assumed(polyattn):
    text = polyattn("plan", "--shape", "flux", "--hosts", "1").out
    assert "assumed, not measured: the cost of each further peer" in text
    assert "293 GB/s inside and 45 GB/s across hosts" in text


def test_figures_of_another_machine(polyattn):
    options = ("plan", "--shape", "wan480", "--hosts", "2", "--json")
    plain = polyattn(*options).json
    other = polyattn(*options, "--tflops", "100", "--inside", "20", "--across", "5").json
    assert other["machine"]["flops"] == 1e14
    assert other["machine"]["inside"]["bytes_per_second"] == 2e10
    assert other["machine"]["across"]["bytes_per_second"] == 5e9
    assert other["machine"]["copy"] == plain["machine"]["copy"]
    slower = [facts["shapes"]["wan480"]["milliseconds_alone"] for facts in (plain, other)]
    assert slower[1] == pytest.approx(slower[0] * 6.89, rel=1e-3)


def test_a_call_of_ones_own_with_fewer_kv_heads(polyattn):
    facts = polyattn("plan", "--q", "2,8192,32,128", "--k", "2,1024,8,128", "--hosts", "1", "--json").json
    assert list(facts["shapes"]) == ["asked"]
    work = facts["shapes"]["asked"]["work"]
    wanted = {"rows": 8192, "heads": 32, "dim": 128, "batch": 2, "keys": 1024, "kv_heads": 8}
    assert {name: work[name] for name in wanted} == wanted


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("paged")])
def test_named_shapes_are_those_of_bench(name):
    work, made = work_of(name), workload_of(name, torch.device("meta"), torch.bfloat16, small=False)
    assert work.tensor(work.rows, work.heads, work.dim) == made.q.numel() * 2
    assert work.tensor(work.k_rows, work.k_heads, work.v_width) == made.v.numel() * 2
    assert work.batch * work.rows * work.k_rows * work.visible == pytest.approx(made.pairs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shape", "nonsense"), "--shape nonsense: there are flux, "),
        (("--shape", "paged16"), "--shape paged16: paged caches are not shared out over ranks"),
        (("--k", "1,8,2,64"), "--k: --q is needed beside it"),
        (("--q", "8,2,64"), "--q: B,S,H,D, each at least 1, is needed, got 8,2,64"),
        (("--q", "1,0,2,64"), "--q: B,S,H,D, each at least 1, is needed, got 1,0,2,64"),
        (("--q", "1,8,3,64", "--k", "1,8,2,64"), "--k: q's batch and width, and a number of heads that divides q's"),
        (("--hosts", "1,0"), "a number of at least 1 is needed, got '0'"),
        (("--ranks-per-host", "100000", "--hosts", "1,100000"), "100000 x 100000 are more than 1048576 ranks"),
        (("--inside", "-1"), "a number above 0 is needed, got '-1'"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(polyattn, options, said):
    answer = polyattn("plan", *options)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert said in answer.err


def priced(name: str, **seconds: float) -> tuple[Strategy, Cost]:
    return Strategy(**{name: 8}), Cost(**seconds)


def test_the_reason_names_what_the_next_kind_spends_more_on():
    first, second = priced("ulysses", attention=1e-3, moving=1e-4), priced("gather", attention=1e-3, moving=9e-4)
    assert why_first(first, second) == "gather 8 takes 0.8 ms more, 0.8 of them bytes on the links"


def test_what_the_model_cannot_tell_apart_is_said_to_be_close():
    first = priced("ulysses", attention=1e-3)
    assert why_first(first, priced("ring", attention=1e-3 * (1 + 0.9 * ERROR))).startswith("too close to call: ring 8")
    assert why_first(first, priced("ring", attention=1e-3 * (1 + 1.1 * ERROR))).startswith("ring 8 takes")
    assert why_first(first, None) == "there is no other"


def test_ranks_that_are_no_help_are_told(polyattn):
    (planned,) = polyattn("plan", "--q", "1,256,2,64", "--hosts", "64", "--json").json["shapes"]["asked"]["ranks"]
    assert planned["why"] == "one rank alone is faster"
