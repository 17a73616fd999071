"""One pass over the installed distributions: the entry points of our two groups, nothing of them imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyattn.environment import normalised

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

PLATFORMS = "polyattn.platforms"
BACKENDS = "polyattn.backends"

#: What somebody else's code may raise and still be no more than broken. sys.exit() counts; Ctrl-C is the user's.
BROKEN = (Exception, SystemExit)


_UNNAMED = "(unnamed)"


@dataclass(frozen=True)
class Candidate:
    """One entry point. `unreadable` says why its distribution's entry_points.txt could not be parsed."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    unreadable: str = ""

    @property
    def owner(self) -> str:
        """The distribution's normalised name."""
        return normalised(self.distribution)

    def load(self) -> Any:
        """Import what the entry point names."""
        return load(self.value)

    def __str__(self) -> str:
        return f"{self.name!r} (distribution {self.distribution} {self.version}, entry point {self.value})"


def load(reference: str) -> Any:
    """The object that "module:attribute" names."""
    from importlib.metadata import EntryPoint

    return EntryPoint(name="", value=reference, group="").load()


def scan() -> tuple[Candidate, ...]:
    """Every candidate of both groups, each once, in an order that does not depend on the file system.

    A distribution seen twice (an editable install beside its wheel, two spellings of one name) counts once:
    the first on sys.path, whose modules are the ones that Python imports.
    """
    seen: dict[tuple[str, str, str], Candidate] = {}
    for candidate in _all():
        seen.setdefault((candidate.group, candidate.owner, candidate.name), candidate)
    return tuple(sorted(seen.values(), key=lambda c: (c.group, c.name, c.owner, c.value)))


def _all() -> Iterator[Candidate]:
    # importlib.metadata costs tens of milliseconds to import: not before it is needed.
    from importlib import metadata

    try:
        found = metadata.entry_points()
    except BROKEN:
        # One malformed entry_points.txt of an unrelated distribution makes the call above raise.
        yield from _one_by_one(metadata.distributions())
        return
    for group in (PLATFORMS, BACKENDS):
        for entry in found.select(group=group):
            yield _candidate(entry, entry.dist)


def _one_by_one(distributions: Iterable[Distribution]) -> Iterator[Candidate]:
    passed: set[str] = set()
    for distribution in distributions:
        owner = normalised(_identity(distribution)[0])
        if owner in passed and owner != _UNNAMED:  # hidden by its namesake before it on sys.path, as in entry_points()
            continue
        passed.add(owner)
        try:
            entries = [entry for entry in distribution.entry_points if entry.group in (PLATFORMS, BACKENDS)]
        except BROKEN as error:
            if _concerns_us(distribution):
                name, version = _identity(distribution)
                text = f"entry_points.txt cannot be read: {type(error).__name__}: {error}"
                yield Candidate(PLATFORMS, name, "?", name, version, unreadable=text)
            continue
        for entry in entries:
            yield _candidate(entry, distribution)


def _candidate(entry: EntryPoint, distribution: Distribution | None) -> Candidate:
    return Candidate(entry.group, entry.name, entry.value, *_identity(distribution))


def _identity(distribution: Distribution | None) -> tuple[str, str]:
    try:
        facts: Any = distribution.metadata if distribution is not None else {}
        return facts["Name"] or _UNNAMED, facts["Version"] or "(no version)"
    except BROKEN:
        return _UNNAMED, "(no version)"


def _concerns_us(distribution: Distribution) -> bool:
    try:
        text = distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        text = error.object.decode("latin-1")
    except BROKEN:
        return False
    return f"[{PLATFORMS}]" in text or f"[{BACKENDS}]" in text
