"""`polyattn bench --compare`: what became slower by more than the rounds scatter, and what ran no more."""

import json

import pytest

MACHINE = {"name": "Toy 1", "arch": "toy1", "versions": {"torch": "2.11.0"}}


def result(rounds, *, machine=MACHINE, shape="flux", **facts):
    """A result of `bench --json` of one shape: backend -> its rounds."""
    fastest = min(sum(taken) / len(taken) for taken in rounds.values())
    rows = [
        {"backend": name, "milliseconds": sorted(taken)[len(taken) // 2], "ratio": sum(taken) / len(taken) / fastest,
         "rounds": taken}
        for name, taken in rounds.items()
    ]  # fmt: skip
    shapes = {shape: {"dtype": "bfloat16", "small": False, "backends": rows, **facts}}
    return {"machine": machine, "shapes": shapes}


@pytest.fixture
def compared(polyattn, tmp_path):
    def run(before, after, *options):
        for name, data in (("old", before), ("new", after)):
            (tmp_path / name).write_text(data if isinstance(data, str) else json.dumps(data))
        return polyattn("bench", "--compare", str(tmp_path / "old"), str(tmp_path / "new"), *options)

    return run


STEADY = [1.0, 1.01, 0.99, 1.0, 1.0]


@pytest.mark.parametrize(("rounds", "verdict", "code"), [
    ([value * 1.1 for value in STEADY], "slower", 1),
    ([value * 0.8 for value in STEADY], "faster", 0),
    ([value * 1.02 for value in STEADY], "same", 0),  # less than is told at all
    ([1.0, 1.3, 0.8, 1.1, 1.1], "same", 0),  # its own rounds scatter more
])  # fmt: skip
def test_a_change_is_one_that_the_rounds_do_not_explain(compared, rounds, verdict, code):
    answer = compared(result({"fa3": STEADY}), result({"fa3": rounds}), "--json")
    assert [change["verdict"] for change in answer.json["changes"]] == [verdict]
    assert answer.code == code


def test_the_table_names_the_slower_one_and_its_place_among_the_others(compared):
    before, after = ({"fa3": [1.0] * 5, "sdpa": [2.0 * factor] * 5} for factor in (1, 1.5))
    answer = compared(result(before), result(after))
    row = next(line for line in answer.out.splitlines() if " sdpa " in line)
    assert row.split()[:6] == ["flux", "bfloat16", "sdpa", "2", "3", "+50.0%"]
    assert "2.00 -> 3.00" in row
    assert row.endswith("slower")
    assert answer.code == 1


def test_a_backend_that_runs_no_more_is_worse_and_a_new_one_is_told(compared):
    answer = compared(result({"fa3": STEADY, "sdpa": STEADY}), result({"sdpa": STEADY, "cudnn": STEADY}), "--json")
    assert answer.json["gone"] == ["flux bfloat16: fa3"]
    assert answer.json["new"] == ["flux bfloat16: cudnn"]
    assert answer.code == 1


def test_a_shape_that_was_not_measured_again_says_nothing(compared):
    answer = compared(result({"fa3": STEADY}), result({"fa3": STEADY}, shape="tiny"), "--json")
    assert (answer.json["changes"], answer.json["gone"], answer.code) == ([], [], 0)


def test_scaled_down_shapes_are_not_compared_with_whole_ones(compared):
    answer = compared(result({"sdpa": STEADY}), result({"sdpa": STEADY}, small=True), "--json")
    assert answer.json["changes"] == []


def test_other_machines_and_versions_are_told(compared):
    other = {**MACHINE, "name": "Toy 2", "versions": {"torch": "2.13.0", "toy-kernels": "1"}}
    answer = compared(result({"fa3": STEADY}), result({"fa3": STEADY}, machine=other))
    assert "the machines differ: times may, too" in answer.out
    for line in ("Toy 1 -> Toy 2", "2.11.0 -> 2.13.0", "- -> 1"):
        assert line in answer.out


@pytest.mark.parametrize(("text", "said"), [
    ("{}", "results of `polyattn bench --json` are needed (no 'shapes')"), ("[1]", "are needed"),
    ("nothing", "no JSON"),
])  # fmt: skip
def test_a_file_that_is_no_result_is_one_line_and_code_2(compared, text, said):
    answer = compared(text, result({"fa3": STEADY}))
    assert said in answer.err
    assert answer.code == 2


def test_a_real_result_compares_with_itself(polyattn, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(polyattn("bench", "--shapes", "tiny", "--seconds", "0.05", "--json").out)
    answer = polyattn("bench", "--compare", str(path), str(path), "--json")
    assert {change["verdict"] for change in answer.json["changes"]} == {"same"}
    assert answer.code == 0
