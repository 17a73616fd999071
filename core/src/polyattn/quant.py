"""Quantised attention as asked for, and whether a layer at a denoising step runs with it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

METHODS = ("fp8", "int8", "mxfp8", "mxfp4")


@dataclass(frozen=True)
class Quant:
    """Quantised q.k and p.v products.

    method       "fp8", "int8", "mxfp8" or "mxfp4"
    rotate       rotate q and k by a fixed orthonormal Hadamard matrix first, which spreads outliers
    skip_layers  layer indices (the first integer in the layer's prefix) that stay unquantised
    skip_steps   denoising steps (`pa.step`) that stay unquantised; an unknown step counts as skipped

    >>> import polyattn as pa
    >>> pa.Quant("fp8", skip_layers=(0, 1)).method
    'fp8'
    """

    method: str
    rotate: bool = True
    skip_layers: tuple[int, ...] = ()
    skip_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"quant: {self.method!r} is not a method; accepted are {', '.join(METHODS)} (None is off)")
        for name in ("skip_layers", "skip_steps"):
            given = getattr(self, name)
            if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
                raise TypeError(f"quant.{name}: a tuple of integers is needed, got {given!r}")
            indices = tuple(given)
            if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in indices):
                raise ValueError(f"quant.{name}: non-negative integers are needed, got {indices}")
            object.__setattr__(self, name, indices)


def as_quant(given: object) -> Quant | None:
    """The caller's `quant=`: a Quant, a method's name, or None ("auto" means unquantised)."""
    if given is None or given == "auto":
        return None
    if isinstance(given, str):
        return Quant(given)
    if isinstance(given, Quant):
        return given
    raise TypeError(
        f"quant: a polyattn.Quant, one of {', '.join(METHODS)}, or None is needed, got {type(given).__name__}"
    )


def layer_index(prefix: str) -> int | None:
    """The first integer in a layer's prefix: 3 for "blocks.3.attn1"."""
    match = re.search(r"\d+", prefix)
    return int(match.group()) if match else None


def skipped(quant: Quant, layer: int | None, step: int | None) -> str | None:
    """Why this layer at this step runs unquantised, or None if it is quantised."""
    if quant.skip_layers and layer is None:
        raise ValueError("quant.skip_layers: the layer's prefix holds no index, so that no layer can be skipped")
    if layer is not None and layer in quant.skip_layers:
        return f"quant {quant.method} skipped: layer {layer} is in skip_layers"
    if quant.skip_steps and step is None:
        return f"quant {quant.method} skipped: the step is unknown (wrap the loop's body in pa.step(i, total))"
    if step is not None and step in quant.skip_steps:
        return f"quant {quant.method} skipped: step {step} is in skip_steps"
    return None
