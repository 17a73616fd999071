"""What machine the emulator passes for: the releases, the chip and the lint mode; every fact of a version is a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class TorchNpu:
    """A release of torch_npu: what its schemas have."""

    fusion_sink: bool = True  #: softmax_layout and sink of npu_fusion_attention and its v2
    fusion_dropout_mask: bool = True  #: dropout_mask, seed and offset of them
    fusion_v3: bool = True
    fia_v2: bool = True
    block_quant: bool = True
    mx_quant: bool = True
    mx_low_bound: bool = True  #: max_low_bound of npu_dynamic_mx_quant


@dataclass(frozen=True)
class Cann:
    """A release of the runtime below: what its kernels take."""

    version: str  #: as torch_npu tells it
    tnd_head_dims: frozenset[int]  #: of npu_fused_infer_attention_score in TND
    tnd_fp16: bool  #: of the same
    tnd_paged: bool  #: of the same, with a block table
    tnd_without_mask: bool  #: False: its TND with sparse_mode 0 gives the mean of V
    sink: bool
    fusion_head_dim: int  #: the largest of npu_fusion_attention; documents also say 768
    fia_page: int  #: the largest block_size of its prompt kernel; a constant in the sources says 1024


#: torch_npu's releases, as the op list in each wheel declares them. A newer one is a new row.
TORCH_NPU = {
    "2.6.0": TorchNpu(
        fusion_sink=False, fusion_dropout_mask=False, fusion_v3=False, fia_v2=False,
        block_quant=False, mx_quant=False, mx_low_bound=False,
    ),
    "2.9.0": TorchNpu(fusion_dropout_mask=False, fusion_v3=False, mx_quant=False),
    "2.9.1": TorchNpu(mx_low_bound=False),
    "2.11.0": TorchNpu(),
    "2.13.0": TorchNpu(),
    "2.14.0": TorchNpu(),
}  # fmt: skip

#: CANN's releases. "broken" is the stack of a public report, with its fault.
_NEWEST = Cann(
    version="8.5.0", tnd_head_dims=frozenset({64, 128, 192}), tnd_fp16=False, tnd_paged=True,
    tnd_without_mask=True, sink=True, fusion_head_dim=512, fia_page=512,
)  # fmt: skip
CANN = {
    "8.2": replace(_NEWEST, version="8.2.RC1", tnd_head_dims=frozenset({128, 192}), tnd_paged=False, sink=False),
    "8.5": _NEWEST,
    "8.5-fp16": replace(_NEWEST, tnd_fp16=True),
    "8.5-768": replace(_NEWEST, fusion_head_dim=768, fia_page=1024),
    "broken": replace(_NEWEST, tnd_without_mask=False),
}

#: Chip -> the number that get_soc_version() gives and the device's name; "none" is a machine without a card.
SOCS = {
    "310P": (202, "Ascend310P3"),
    "A2": (222, "Ascend910B3"),
    "A3": (252, "Ascend910_9391"),
    "A5": (260, "Ascend950"),
    "none": (-1, ""),
}


#: MindIE-SD: the precisions of its quant_attention, which the one on PyPI does not have. Later rows are on that one's
#: real package, with the function added as the sources to come have it.
MINDIESD: dict[str, tuple[str, ...]] = {
    "3.1.0": (),
    "unreleased-fp8": ("fp8", "mxfp8"),
    "unreleased": ("fp8", "mxfp8", "mxfp4"),
}


@dataclass(frozen=True)
class Stack:
    """One machine. With `lint`, what the vendor leaves undefined or gets silently wrong is a LintError."""

    torch_npu: str = "2.13.0"
    cann: str = "8.5"
    soc: str = "A2"
    mindiesd: str = "3.1.0"
    lint: bool = False
    release: TorchNpu = field(init=False, repr=False)
    kernels: Cann = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "release", TORCH_NPU[self.torch_npu])
        object.__setattr__(self, "kernels", CANN[self.cann])

    @property
    def soc_version(self) -> int:
        """The vendor's number of the chip."""
        return SOCS[self.soc][0]

    @property
    def precisions(self) -> tuple[str, ...]:
        """What mindiesd.quant_attention takes; none where it is missing."""
        return MINDIESD[self.mindiesd]

    @property
    def device_count(self) -> int:
        """Cards that the process sees."""
        return 0 if self.soc == "none" else 1


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
    """The current machine with changes: `using(lint=True)`, `using(soc="A5")`."""
    _CURRENT.append(replace(current(), **changes))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _CURRENT.pop()


def require(held: bool, words: str) -> None:
    """A check of torch_npu itself: RuntimeError with its words where it does not hold."""
    if not held:
        raise RuntimeError(words)


def require_op(held: bool, op: str, words: str, code: int = 561103) -> None:
    """A check below torch_npu: RuntimeError that names the op and the code (161002 a parameter, 561103 tiling)."""
    if not held:
        raise RuntimeError(f"call {op} failed, error code is {code}\nEZ9999: Inner Error! {words}")


def lint(held: bool, words: str) -> None:
    """What the vendor does not check: LintError in lint mode, nothing otherwise."""
    if current().lint and not held:
        lints.append(words)
        raise LintError(words)
