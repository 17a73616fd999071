"""What machine the emulator passes for: the device, the releases and the lint mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.emulators.xpu.releases import DEVICES, KERNELS, TORCH, Library, Torch, architecture


@dataclass(frozen=True)
class Stack:
    """One machine. With `lint`, what the vendor leaves undefined or silently ignores is a LintError.

    `unlucky`: what is reported of one call in thousands happens at every call.
    """

    device: str = "BMG-G21"
    kernels: str = "0.1.16.2"
    torch: str = "2.14.0+xpu"
    lint: bool = False
    unlucky: bool = False

    @property
    def library(self) -> Library | None:
        """The kernels that serve the device; None where none do."""
        return KERNELS[self.kernels].get(DEVICES[self.device][0])

    @property
    def fused(self) -> Torch:
        """What torch's own SDPA has."""
        return TORCH[self.torch]

    @property
    def arch(self) -> str:
        """As SYCL numbers it."""
        return architecture(self.device)


class LintError(AssertionError):
    """The vendor would go on here, with an undefined or a silently wrong answer. Raised in lint mode only."""


_CURRENT = [Stack()]
#: What every LintError said: a caller that swallows exceptions does not swallow this.
lints: list[str] = []


def current() -> Stack:
    """The machine now passed for."""
    return _CURRENT[-1]


@contextmanager
def using(**changes: object) -> Iterator[Stack]:
    """The current machine with changes: `using(lint=True)`, `using(device="PTL")`."""
    _CURRENT.append(replace(current(), **changes))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _CURRENT.pop()


def require(held: bool, words: str) -> None:
    """A check of the vendor's: RuntimeError with its words where it does not hold."""
    if not held:
        raise RuntimeError(words)


def lint(held: bool, words: str) -> None:
    """What the vendor does not check: LintError in lint mode, nothing otherwise."""
    if current().lint and not held:
        lints.append(words)
        raise LintError(words)
