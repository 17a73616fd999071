"""What machine the emulators pass for: chip, releases and lint mode; every fact of a chip or a release is a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """An architecture: what the kernel packages have for it."""

    name: str
    flash_attn_ck: bool  #: flash_attn 2.8.3 builds its extension for it
    aiter_ck: bool  #: aiter's CK kernels are built for it
    aiter_asm: bool  #: aiter has its hand-written kernels for it
    aotriton_experimental: bool = False  #: SDPA's fused kernels want a variable
    sdpa_head_dim: int = 512
    decode_fault: bool = False  #: ROCm/aiter issue 2229


#: gcnArchName up to its first colon -> the chip.
CHIPS = {
    "gfx90a": Chip("AMD Instinct MI250X", True, False, False),
    "gfx942": Chip("AMD Instinct MI300X", True, True, True, decode_fault=True),
    "gfx950": Chip("AMD Instinct MI355X", True, True, True),
    "gfx1100": Chip("AMD Radeon PRO W7900", False, False, False, True, 256),
}


@dataclass(frozen=True)
class Aiter:
    """A build of amd-aiter."""

    window_items: tuple[int, ...]  #: how many entries a window may have; the third counts sink tokens
    asm_reads_softcap: bool  #: False: its kernels drop it without a word; True: such a call goes to CK
    asm_192: frozenset[str]  #: chips whose kernels take a head dim of 192 over values of 128
    prefill_pages: tuple[int, ...]  #: rows of a page that its tests name; 1 has K and V of rank 3
    prefill_head_dim: int  #: the largest that a kernel of it is built for


#: The wheel that pip finds, and its main branch of August 2026.
AITER = {
    "0.1.7.post2.dev18": Aiter((2,), False, frozenset({"gfx950"}), (1,), 128),
    "main-2026-08": Aiter((2, 3), True, frozenset({"gfx942", "gfx950"}), (1, 16, 1024), 256),
}


@dataclass(frozen=True)
class Torch:
    """A ROCm build of torch: what its varlen attention does."""

    unbounded_is_nan: bool  #: window sides of -1 reach AOTriton as bounds (pytorch PR 173469)
    aotriton_windows: bool = True  #: False: both sides are ignored with one warning
    packed_lse: bool = False  #: True: [H,T], as CUDA has it and pytorch PR 172246 for CK; False: [B,H,max_q]


TORCH = {
    "2.10.0+rocm7.0": Torch(True),
    "2.11.0+rocm7.2": Torch(False),
    "2.13.0+rocm7.2": Torch(False),
    "2.13.0+rocm7.2.packed": Torch(False, packed_lse=True),
    "2.8.0+rocm6.4": Torch(False, aotriton_windows=False),
}

FLASH_ATTN = "2.8.3.post2"
TRITON = "3.6.0"


@dataclass(frozen=True)
class Stack:
    """One described machine."""

    arch: str = "gfx942"
    aiter: str = "0.1.7.post2.dev18"
    torch: str = "2.13.0+rocm7.2"
    lint: bool = True  #: what the vendor ignores without a word is an error

    @property
    def chip(self) -> Chip:
        """The facts of its chip."""
        return CHIPS[self.arch]

    @property
    def build(self) -> Aiter:
        """The facts of its aiter."""
        return AITER[self.aiter]

    @property
    def varlen(self) -> Torch:
        """The facts of its torch."""
        return TORCH[self.torch]

    @property
    def hip(self) -> str:
        """The version that torch.version.hip has."""
        return self.torch.partition("+rocm")[2]


class LintError(AssertionError):
    """The vendor would go on here and give another answer than the one asked for."""


#: What lint objected to since the process began, whether or not it was caught.
lints: list[str] = []

_current = Stack()


def now() -> Stack:
    """The machine that is passed for."""
    return _current


@contextmanager
def using(**facts: str | bool) -> Iterator[Stack]:
    """Pass for another machine."""
    global _current
    before, _current = _current, replace(_current, **facts)  # type: ignore[arg-type]
    try:
        if _current.arch not in CHIPS or _current.aiter not in AITER or _current.torch not in TORCH:
            raise KeyError(f"no such machine: {_current}")
        yield _current
    finally:
        _current = before


def silent(text: str) -> None:
    """The vendor says nothing and answers another question: an error in lint mode, nothing outside of it."""
    if _current.lint:
        lints.append(text)
        raise LintError(text)
