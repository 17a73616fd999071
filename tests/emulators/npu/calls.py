"""What a call of a native op is in a table: the op, the vendor's function that made it, the arguments it was given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tests.emulators.npu.stack import current, lint

#: Packages of others that call native ops: a call names the function of theirs that led to it.
_PACKAGES = ("mindiesd", "diffusers")
#: The module that stands in for a function of mindiesd's.
_STANDS_IN = {"tests.emulators.npu.quant_attention": "mindiesd"}


class Call(NamedTuple):
    """One call of a native op.

    op         "npu::npu_fusion_attention"
    arguments  each that reached the op, by the schema's name
    defaults   every argument that has a default in the schema
    through    "mindiesd.attention_forward": the outermost function of a package that led here; "" for a direct call
    """

    op: str
    arguments: dict[str, Any]
    defaults: dict[str, Any]
    through: str = ""

    def said(self) -> dict[str, Any]:
        """The arguments that differ from the schema's defaults, a tensor as "bfloat16[2, 5, 4, 64]"; JSON-ready."""
        return {
            name: described(value)
            for name, value in self.arguments.items()
            if isinstance(value, torch.Tensor) or value != self.defaults.get(name, self)
        }


def described(value: Any) -> Any:
    """A tensor by its dtype and shape, with its strides where it is not contiguous; anything else as it is."""
    if isinstance(value, torch.Tensor):
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
    return list(value) if isinstance(value, tuple) else value


_RECORDINGS: list[list[Call]] = []


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Every call of an emulated op in a scope, in order.

    with recording() as log:
        polyattn.attention(q, k, v, backend="fusion")
    rows = [(call.through, call.op, call.said()) for call in log]
    """
    log: list[Call] = []
    _RECORDINGS.append(log)
    try:
        yield log
    finally:
        _RECORDINGS.remove(log)


def recorded(call: Call) -> None:
    """Adds a call to every scope that is open."""
    for log in _RECORDINGS:
        log.append(call)


def lint_of_caller() -> None:
    """LintError where MindIE-SD's attention_forward loses a mask on the way, or chooses its op by timing.

    What its caller gave does not reach the op: the function's own frame is asked.
    """
    frame = sys._getframe(1) if current().lint else None
    while frame is not None:
        if frame.f_code.co_name == "attention_forward" and frame.f_globals.get("__name__", "").startswith("mindiesd."):
            mask = frame.f_locals.get("attn_mask")
            given = frame.f_locals.get("kwargs", {})
            floating = isinstance(mask, torch.Tensor) and mask.is_floating_point()
            lint(not floating, "attention_forward: a floating mask is read as a boolean one")
            runtime = given.get("opt_mode", "runtime") == "runtime" and frame.f_locals.get("fused", True)
            lint(not runtime, "attention_forward: opt_mode runtime times its ops and swallows what they raise")
        frame = frame.f_back  # type: ignore[assignment]


def mask_of_caller() -> bool:
    """Whether the attention_forward that led here was given a mask."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "attention_forward" and frame.f_locals.get("attn_mask") is not None:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def came_through() -> str:
    """The outermost function of a package on the stack, of those that the package publishes."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = _STANDS_IN.get(module, module.partition(".")[0])
        if package in _PACKAGES:
            public = getattr(sys.modules.get(package), "__all__", ())
            name = frame.f_code.co_name
            if name in public or module in _STANDS_IN or not found:
                found = f"{package}.{name}"
        frame = frame.f_back  # type: ignore[assignment]
    return found
