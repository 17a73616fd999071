"""What machine the emulator passes for, and the facts of its releases; a newer release is a new row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sdk:
    """A MUSA SDK: what its libraries take."""

    explicit_scale: bool  #: muDNN's SDPA with another scale than D**-0.5
    mate: bool  #: mate loads
    chunk: bool  #: mate's attention_chunk


#: By release. mate's sources name 4.3.6 and 5.1, torch_musa's 4.2.
SDKS = {
    "4.0.0": Sdk(explicit_scale=False, mate=False, chunk=False),
    "4.2.0": Sdk(explicit_scale=True, mate=False, chunk=False),
    "4.3.6": Sdk(explicit_scale=True, mate=True, chunk=False),
    "5.1.0": Sdk(explicit_scale=True, mate=True, chunk=True),
}

#: Card -> its architecture's numbers.
CARDS = {"S80": (2, 1), "S4000": (2, 2), "S5000": (3, 1)}

VERSIONS = {"torch": "2.7.1", "torch_musa": "2.7.1", "mate": "0.2.2", "flash_attn_3": "0.2.2"}


@dataclass(frozen=True)
class Stack:
    """One machine. With `lint`, what the vendor leaves undefined or unsaid is a LintError."""

    card: str = "S5000"
    sdk: str = "4.3.6"
    lint: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """The architecture, such as (3, 1)."""
        return CARDS[self.card]

    @property
    def libraries(self) -> Sdk:
        """What the SDK has."""
        return SDKS[self.sdk]


class LintError(AssertionError):
    """The vendor would go on here, with an answer that no source describes. Raised in lint mode only."""


_CURRENT = [Stack()]
#: What every LintError said: a caller that swallows exceptions does not swallow this.
lints: list[str] = []


def current() -> Stack:
    """The machine now passed for."""
    return _CURRENT[-1]


@contextmanager
def using(**changes: object) -> Iterator[Stack]:
    """The current machine with changes: `using(lint=True)`, `using(card="S80")`."""
    _CURRENT.append(replace(current(), **changes))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _CURRENT.pop()


def require(held: bool, words: str, kind: type[Exception] = RuntimeError) -> None:
    """A check of the vendor's, with its words where it does not hold."""
    if not held:
        raise kind(words)


def lint(held: bool, words: str) -> None:
    """What the vendor does not check: LintError in lint mode, nothing otherwise."""
    if current().lint and not held:
        lints.append(words)
        raise LintError(words)
