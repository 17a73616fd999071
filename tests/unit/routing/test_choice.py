"""What a written choice means, and which names it may hold."""

from __future__ import annotations

import pytest

from polyattn.choice import binds, check_names, chosen_first, parse_choice
from tests.unit.fakes import DENSE_ONLY, EVERYTHING, VARLEN_ONLY

ALL = (DENSE_ONLY, VARLEN_ONLY, EVERYTHING)
KNOWN = {"cpu": ("sdpa", "blocked"), "cuda": ("fa3", "sdpa")}


def check(text: str, source: str) -> None:
    check_names(parse_choice(text, source), "cpu", KNOWN["cpu"], lambda: KNOWN)


def names(text: str) -> tuple[list[str], list[str]]:
    named, automatic = chosen_first(parse_choice(text, "argument"), "toy", ALL)
    return [b.name for b in named], [b.name for b in automatic]


@pytest.mark.parametrize(
    ("text", "named", "automatic"),
    [
        ("everything", ["everything"], []),
        ("everything,dense_only", ["everything", "dense_only"], []),
        (" Everything , toy:dense_only ", ["everything", "dense_only"], []),
        ("varlen_only,auto", ["varlen_only"], ["dense_only", "everything"]),
        ("-dense_only", [], ["varlen_only", "everything"]),
        ("everything,-dense_only,auto", ["everything"], ["varlen_only"]),
        ("", [], ["dense_only", "varlen_only", "everything"]),
        ("auto", [], ["dense_only", "varlen_only", "everything"]),
        ("other:everything,auto", [], ["dense_only", "varlen_only", "everything"]),
    ],
)
def test_a_choice_is_an_ordered_list(text: str, named: list[str], automatic: list[str]) -> None:
    assert names(text) == (named, automatic)


def test_auto_can_only_end_a_choice() -> None:
    with pytest.raises(ValueError, match="'auto' can only end"):
        parse_choice("auto,fa3", "argument")


def test_a_choice_is_one_string() -> None:
    with pytest.raises(TypeError, match="use_backend.*list"):
        parse_choice(["fa3"], "context")


@pytest.mark.parametrize("source", ["argument", "context", "configure", "environment"])
def test_a_name_nobody_has_always_raises_and_lists_the_names(source: str) -> None:
    with pytest.raises(ValueError, match="'flash_attnn'") as refusal:
        check("FLASH_ATTNN", source)
    text = str(refusal.value)
    assert "FLASH_ATTNN" in text
    assert "blocked" in text
    assert "fa3" in text
    if source == "environment":
        assert "POLYATTN_BACKEND" in text


def test_an_argument_must_name_a_backend_of_the_tensors_platform() -> None:
    with pytest.raises(ValueError, match="'fa3'.*not a backend of the tensors' platform"):
        check("fa3", "argument")
    check("sdpa", "argument")


@pytest.mark.parametrize("source", ["context", "configure", "environment"])
def test_other_choices_bind_only_platforms_that_have_the_name(source: str) -> None:
    choice = parse_choice("fa3", source)
    check("fa3", source)
    assert not binds(choice, "cpu", KNOWN["cpu"])
    assert binds(choice, "cuda", KNOWN["cuda"])
    assert not binds(parse_choice("cuda:sdpa", source), "cpu", KNOWN["cpu"])


def test_other_platforms_are_asked_only_for_a_name_that_is_not_at_hand() -> None:
    def never() -> dict[str, tuple[str, ...]]:
        raise AssertionError("asked")

    check_names(parse_choice("sdpa,-blocked,cpu:sdpa", "context"), "cpu", KNOWN["cpu"], never)
