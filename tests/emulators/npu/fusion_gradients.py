"""Autograd of npu_fusion_attention, _v2 and _v3: each backward calls that version's own gradient op.

torch.library.register_autograd takes no op with tensors that are keywords only, which the second version has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.emulators.npu import registry

#: Forward -> backward, and the arguments whose gradients the backward gives, in order.
VERSIONS = {
    "npu_fusion_attention": ("npu_fusion_attention_grad", ("pse", "sink")),
    "npu_fusion_attention_v2": ("npu_fusion_attention_grad_v2", ("pse", "query_rope", "key_rope", "sink")),
    "npu_fusion_attention_v3": ("npu_fusion_attention_grad_v3", ("pse", "sink")),
}
_INPUTS = ("query", "key", "value")
#: Arguments of the forward alone.
_FORWARD_ONLY = ("dropout_mask", "seed", "offset", "scale", "head_num", "input_layout", *_INPUTS)


def register() -> None:
    """For each version that this torch_npu has."""
    for forward, (backward, later) in VERSIONS.items():
        if hasattr(torch.ops.npu, forward):
            op = getattr(torch.ops.npu, forward).default
            registry.library("npu").impl(forward, _differentiable(op, backward, later), "AutogradPrivateUse1")


def _differentiable(op: Any, backward: str, later: tuple[str, ...]) -> Callable[..., Any]:
    order = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(order, args, strict=False)) | kwargs
        names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        if not (torch.is_grad_enabled() and any(given[name].requires_grad for name in names)):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)
        return _Attention.apply(op, backward, later, given, names, *(given[name] for name in names))

    return kernel


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, op: Any, backward: str, later: tuple[str, ...], given: dict[str, Any], names: list[str],
        *tensors: torch.Tensor,
    ) -> Any:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            out = op(**(given | dict(zip(names, tensors, strict=True))))
        ctx.mark_non_differentiable(*(t for t in out[1:] if isinstance(t, torch.Tensor)))
        ctx.save_for_backward(*tensors, *(t for t in out[:3]))
        ctx.facts, ctx.names, ctx.drawn = (backward, later, given), names, (out[4], out[5])
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *rest: Any) -> tuple[Any, ...]:  # type: ignore[override]
        (op, later, given), names = ctx.facts, ctx.names
        *tensors, out, maximum, total = ctx.saved_tensors
        given = given | dict(zip(names, tensors, strict=True))
        asked = {name: value for name, value in given.items() if name not in _FORWARD_ONLY}
        grads = getattr(torch.ops.npu, op)(
            *(given[name] for name in _INPUTS), dy, given["head_num"], given["input_layout"],
            scale_value=given.get("scale", 1.0), softmax_max=maximum, softmax_sum=total, attention_in=out,
            seed=ctx.drawn[0], offset=ctx.drawn[1], **asked,
        )  # fmt: skip
        found = dict(zip((*_INPUTS, *later), grads, strict=False))
        return (None, None, None, None, None, *(found.get(name) for name in names))
