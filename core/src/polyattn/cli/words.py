"""Words of a command line to values, as argparse's `type=`: each says what it needs where it gets something else."""

from __future__ import annotations

import argparse


def shape(text: str) -> tuple[int, ...]:
    """ "1,4608,24,128": sizes."""
    return tuple(_number(word, text, "sizes like 1,4608,24,128 are") for word in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """ "a,b": names, each once."""
    return tuple(dict.fromkeys(name for word in text.split(",") if (name := word.strip())))


def seconds(text: str) -> float:
    """A time; a million seconds are a typing error."""
    return _above_0(text, 1e6, "a number of seconds above 0")


def above_0(text: str) -> float:
    """A finite number above 0."""
    return _above_0(text, float("inf"), "a number above 0")


def count(text: str) -> int:
    """A number of at least 1."""
    number = _number(text, text, "a number of at least 1 is")
    if number == 0:
        raise argparse.ArgumentTypeError(f"a number of at least 1 is needed, got {text!r}")
    return number


def counts(text: str) -> tuple[int, ...]:
    """ "1,8,64": numbers of at least 1."""
    return tuple(count(word) for word in text.split(","))


def window(text: str) -> int | tuple[int | None, ...] | None:
    """ "W" or "L,R"; "none" is unbounded."""
    sides = tuple(_side(word, text) for word in text.split(","))
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"L,R is needed, got {text!r}")
    return sides if len(sides) == 2 else sides[0]


def _above_0(text: str, limit: float, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < limit:
        raise argparse.ArgumentTypeError(f"{wanted} is needed, got {text!r}")
    return value


def _side(word: str, text: str) -> int | None:
    return None if word.strip().lower() == "none" else _number(word, text, "L,R, each a number of keys or 'none', is")


def _number(word: str, text: str, wanted: str) -> int:
    word = word.strip()
    if not (word.isascii() and word.isdecimal()):
        raise argparse.ArgumentTypeError(f"{wanted} needed, got {text!r}")
    return int(word)
