"""What is told of ranks that would make different calls: the fields that differ, and no others."""

from __future__ import annotations

import pytest

from polyattn.distributed.disagreement import difference, rank_names


@pytest.mark.parametrize("told", [{"dtype": "bf16"}, "refused: heads", {}])
def test_ranks_that_tell_the_same_do_not_differ(told: dict[str, str] | str) -> None:
    assert difference([told, told, told]) is None
    assert difference([told]) is None


def test_only_fields_that_differ_are_named() -> None:
    calls = [{"dtype": "bf16", "rows": "7"}, {"dtype": "bf16", "rows": "8"}, {"dtype": "bf16", "rows": "7"}]
    assert difference(calls) == "rows: 7 on ranks 0, 2 but 8 on rank 1"


def test_a_field_that_a_rank_does_not_state_differs() -> None:
    assert difference([{}, {"gate": "True"}]) == "gate: (not stated) on rank 0 but True on rank 1"


def test_calls_with_the_same_fields_in_another_order_are_the_same() -> None:
    assert difference([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]) is None


def test_a_refusal_goes_before_other_differences() -> None:
    told = difference([{"dtype": "bf16"}, "refused: 30 heads", {"dtype": "fp32"}])
    assert told == "rank 1 refused: 30 heads"
    assert difference(["refused: one", {}, "refused: another"]) == "rank 0 refused: one; rank 2 refused: another"


def test_long_values_are_shown_from_where_they_part() -> None:
    same, rest = "x" * 5000, "y" * 5000
    told = difference([{"rows": f"{same}7{rest}"}, {"rows": f"{same}8{rest}"}])
    assert told is not None
    assert "xxx7yyy" in told
    assert "xxx8yyy" in told
    assert len(told) < 500


def test_long_values_that_part_at_their_end_show_it() -> None:
    told = difference([{"rows": "x" * 5000 + "7"}, {"rows": "x" * 5000 + "8"}])
    assert told is not None
    assert "xxx7 on rank 0" in told
    assert "xxx8 on rank 1" in told


def test_a_value_that_begins_another_is_shown_apart_from_it() -> None:
    told = difference([{"rows": "x" * 5000}, {"rows": "x" * 5000 + "7"}])
    assert told is not None
    assert "xxx on rank 0" in told
    assert "xxx7 on rank 1" in told


def test_many_ranks_are_told_as_runs() -> None:
    assert rank_names(range(512)) == "ranks 0-511"
    assert rank_names([9, 1, 2, 3]) == "ranks 1-3, 9"
    assert rank_names([4]) == "rank 4"
