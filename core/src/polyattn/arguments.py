"""The caller's arguments, checked and put into the form that requests use; pure functions, one error a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from polyattn.door.backend import Options
from polyattn.errors import UnsupportedRequest
from polyattn.structures import Structure

Window = tuple[int | None, int | None] | None
#: A window's side from here on is unbounded: beside it places of keys would leave int64.
_UNBOUNDED = 2**62


@dataclass(frozen=True)
class Arguments:
    """How a call attends, apart from its tensors: everything that `pa.attention` and `pa.Attention` share."""

    causal: bool
    window: Window
    softcap: float
    deterministic: bool
    options: tuple[Options, ...]


def checked(causal: Any, window: Any, softcap: Any, deterministic: Any, options: Any) -> Arguments:
    """Arguments in canonical form: with causal the window's right side is 0, an unbounded window is None."""
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    return Arguments(causal, _window(window, causal), _softcap(softcap), deterministic, _options(options))


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: True or False is needed, got {type(value).__name__} {value!r}")


def checked_scale(scale: Any, head_dim: int) -> float:
    """The factor on q.k: `head_dim ** -0.5` unless given; 0.0 means 0.0."""
    if scale is None:
        default: float = float(head_dim) ** -0.5
        return default
    value = _real("scale", scale)
    if not -math.inf < value < math.inf:
        raise ValueError(f"scale: a finite number is needed, got {value}")
    return value


def check_combination(
    structure: Structure | None, causal: bool, window: Window, softcap: float, lse: bool, gate: Any
) -> None:
    """Refuse what a structure does not combine with, by name."""
    kind = "dense" if structure is None else structure.kind
    if kind == "video_tiles":
        asked = [name for name, on in (("causal", causal), ("window", window), ("softcap", softcap)) if on]
        if asked:
            raise UnsupportedRequest(f"VideoTiles does not combine with {', '.join(asked)}")
        video = None if structure is None else structure.facts.video
        if lse and (gate is not None or (video is not None and video.gate)):
            raise UnsupportedRequest("VideoTiles with a gate has no LSE: it is the fine branch's alone")
    elif gate is not None:
        raise ValueError(f"gate: only VideoTiles takes a gate, the structure is {type(structure).__name__}")
    if structure is not None and structure.facts.spans and window is not None:
        raise UnsupportedRequest(
            "spans do not combine with a window: which keys a span's query sees would be ambiguous"
        )


def check_gate(gate: Any, out_shape: tuple[int, ...]) -> None:
    """Raise unless `gate` is a floating tensor of the output's shape; more rows than the output's are allowed."""
    if not isinstance(gate, torch.Tensor):
        raise TypeError(f"gate: a tensor is needed, got {type(gate).__name__}")
    if not gate.dtype.is_floating_point:
        raise TypeError(f"gate: a floating dtype is needed, got {gate.dtype}")
    batch, rows, heads, width = out_shape
    given = tuple(gate.shape)
    if len(given) != 4 or (given[0], given[2], given[3]) != (batch, heads, width) or given[1] < rows:
        raise ValueError(f"gate: the output's shape {list(out_shape)} is needed, or more rows, got {list(given)}")


def _window(window: Any, causal: bool) -> Window:
    if window is None:
        return None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"window: an int or (left, right) is needed, got {window!r}")
        left, right = (_side(window, side) for side in window)
    else:
        left = _side(window, window)
        right = 0 if causal else left
    if causal:
        right = 0
    return None if left is None and (right is None or causal) else (left, right)


def _side(window: Any, side: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, Integral):
        raise TypeError(f"window: counts of keys or None are needed, got {window!r}")
    count = int(side)
    if count < 0:
        raise ValueError(f"window: counts cannot be negative (None is unbounded), got {window!r}")
    return count if count < _UNBOUNDED else None


def _softcap(softcap: Any) -> float:
    value = _real("softcap", softcap)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"softcap: a finite number >= 0 is needed (0.0 is none), got {softcap!r}")
    return value


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not (isinstance(value, Real) or type(value).__module__ == "numpy"):
        raise TypeError(f"{name}: a number is needed, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: a finite number is needed, got one that no float holds") from None


def _options(options: Any) -> tuple[Options, ...]:
    given = (options,) if isinstance(options, Options) else options
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"options: a tuple of typed options is needed, got {type(options).__name__}")
    for option in given:
        if not isinstance(option, Options) or not option.platform:
            raise TypeError(
                f"options: instances of a platform's options class are needed, got {type(option).__name__} {option!r}"
            )
    return tuple(given)
