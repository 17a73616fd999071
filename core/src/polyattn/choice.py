"""A choice of backends: what a user wrote, where, and which backends of a platform it leaves, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyattn.door.backend import Backend


@dataclass(frozen=True)
class Choice:
    """A parsed choice. names: in order of preference; removed: never; auto: fall back to automatic choice.

    source is "argument", "context", "configure" or "environment". The first must name a backend of the tensors'
    platform; the others bind only platforms that have one of that name.
    """

    text: str
    source: str
    names: tuple[str, ...]
    removed: frozenset[str]
    auto: bool


#: Platform name -> its backends' names, asked for when a name is not found at hand.
Known = Callable[[], Mapping[str, tuple[str, ...]]]

AUTOMATIC = Choice("auto", "automatic", (), frozenset(), True)

_WHERE = {
    "argument": "backend",
    "context": "use_backend",
    "configure": "configure",
    "environment": "POLYATTN_BACKEND",
}


def parse_choice(text: object, source: str) -> Choice:
    """Read "fa3,cudnn", "-sdpa", "fa3,auto"; blanks and capitals do not matter, an empty text is automatic.

    Removing alone ("-sdpa") leaves the automatic choice among the others.
    """
    if not isinstance(text, str):
        raise TypeError(f"{_WHERE[source]}: backend names in one string are needed, got {type(text).__name__} {text!r}")
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    removed = frozenset(word[1:].strip() for word in words if word.startswith("-"))
    names = tuple(word for word in words if not word.startswith("-"))
    if "auto" in names[:-1]:
        raise ValueError(f"{_WHERE[source]}: 'auto' can only end a choice, got {text!r}")
    auto = not names or names[-1] == "auto"
    return Choice(text, source, tuple(name for name in names if name != "auto"), removed, auto)


def check_names(choice: Choice, platform: str, here: Sequence[str], known: Known) -> None:
    """Raise ValueError for a name that no installed platform has, or, in an argument, that this platform lacks.

    `here` are this platform's backends; `known` is asked only for a name that is not among them.
    """
    for name in (*choice.names, *sorted(choice.removed)):
        if _short(name, platform) in here:
            continue
        family, _, short = name.rpartition(":")
        elsewhere = {other: names for other, names in known().items() if other != platform}
        anywhere = short in elsewhere.get(family, ()) if family else any(short in names for names in elsewhere.values())
        if anywhere and choice.source != "argument":
            continue
        has = [f"{platform} has {', '.join(here) or 'none'}"]
        has += [f"{other} has {', '.join(names)}" for other, names in elsewhere.items() if names]
        whose = "the tensors' platform" if anywhere else "any installed platform"
        raise ValueError(
            f"{_WHERE[choice.source]}: {name!r} (in {choice.text!r}) is not a backend of {whose}: {'; '.join(has)}"
        )


def binds(choice: Choice, platform: str, available: Sequence[str]) -> bool:
    """Whether the choice says anything about this platform's backends."""
    named = (*choice.names, *choice.removed)
    return not named or any(_is_named(name, platform, available) for name in named)


def chosen_first(
    choice: Choice, platform: str, backends: Sequence[Backend]
) -> tuple[tuple[Backend, ...], tuple[Backend, ...]]:
    """(backends named, in the order named; backends left for automatic choice, in their order)."""
    by_name = {backend.name: backend for backend in backends}
    removed = {_short(name, platform) for name in choice.removed}
    named = tuple(
        by_name[short] for name in choice.names if (short := _short(name, platform)) in by_name and short not in removed
    )
    if not choice.auto:
        return named, ()
    return named, tuple(b for b in backends if b.name not in removed and b not in named)


def _is_named(name: str, platform: str, available: Sequence[str]) -> bool:
    return _short(name, platform) in available


def _short(name: str, platform: str) -> str | None:
    family, _, short = name.rpartition(":")
    return short if family in ("", platform) else None
