"""NpuOptions: what a caller may ask of Ascend's backends beside the attention itself, and what runs without."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from polyattn.vendor import Options
from polyattn_npu.detection import FA_TYPE

LASER = "ascend_laser_attention"
OP_TYPES = ("fused_attn_score", "prompt_flash_attn", LASER)
OP_LAYOUTS = ("BNSD", "BSND", "BSH")
OPT_MODES = ("manual", "static", "runtime")
#: The layout where none is asked for: in it the op gets the tensors as they are.
LAYOUT = "BSND"


@dataclass(frozen=True)
class NpuOptions(Options):
    """Options of platform `npu`; None leaves a choice to the backend. A wrong value raises ValueError, naming it.

    op_type            the op behind MindIE-SD's attention_forward: "fused_attn_score", "prompt_flash_attn" (both
                       `npu:mindie`) or "ascend_laser_attention" (`npu:laser`)
    opt_mode           how MindIE-SD finds the op: "manual", or "static", which is its own choice by a table; "runtime"
                       is known, and refused with the reason
    op_layout          the layout in which a dense op sees the tensors: "BNSD", "BSND" or "BSH". Packed documents are
                       always TND
    laser_input_scale  `npu:laser`: q, k and v are divided by this power of two, which keeps its float16 scores finite,
                       and the output is multiplied by it; 1 divides nothing
    laser_max_abs      `npu:laser`: no entry of q, k and v is larger than this, by which the smallest such power of two
                       is chosen. It is refused where float16 rounds too much, whatever divides, if signs are
                       independent. Entries of one sign, or a pattern that q and k share, are rounded up to
                       sqrt(head_dim) times as much, and taken

    >>> from polyattn_npu import NpuOptions
    >>> NpuOptions(laser_input_scale=8).stated()
    ('laser_input_scale',)
    """

    platform: ClassVar[str] = "npu"
    op_type: str | None = None
    opt_mode: str | None = None
    op_layout: str | None = None
    laser_input_scale: int | None = None
    laser_max_abs: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("op_type", OP_TYPES), ("opt_mode", OPT_MODES), ("op_layout", OP_LAYOUTS)):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, str) and given in known):
                raise ValueError(f"NpuOptions.{name}: one of {', '.join(known)} is needed, got {given!r}")
        if self.laser_input_scale is not None and not _is_power_of_two(self.laser_input_scale):
            raise ValueError(
                f"NpuOptions.laser_input_scale: a power of two from 1 on is needed, got {self.laser_input_scale!r}"
            )
        if self.laser_max_abs is not None and not _is_bound(self.laser_max_abs):
            raise ValueError(f"NpuOptions.laser_max_abs: a finite number above 0 is needed, got {self.laser_max_abs!r}")


def automatic_op(arch: str) -> str:
    """The op type that MindIE-SD has for a device class."""
    return "prompt_flash_attn" if arch == "310P" else "fused_attn_score"


@lru_cache(maxsize=256)
def npu_options(options: tuple[object, ...]) -> NpuOptions:
    """All NpuOptions among a call's options as one; of a field that several state, the last counts."""
    mine = [option for option in options if isinstance(option, NpuOptions)]
    return NpuOptions(**{name: getattr(option, name) for option in mine for name in option.stated()})


def asks_for_laser(options: tuple[object, ...], variables: Mapping[str, str]) -> bool:
    """Whether a call's options, or the machine's variables, ask for laser attention: it is float16 all the way."""
    chosen = npu_options(options)
    stated = chosen.laser_input_scale is not None or chosen.laser_max_abs is not None
    return stated or chosen.op_type == LASER or (chosen.op_type is None and variables.get(FA_TYPE) == LASER)


def _is_power_of_two(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0 and number & (number - 1) == 0


def _is_bound(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= sys.float_info.max
