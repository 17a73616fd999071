"""Steps that every rank takes in one order, and backward in the reverse one.

Backward steps communicate as well, and autograd promises no order of what does not depend on each other: a rank that
took two of them the other way round would mix them up with its peers'. So each step hangs on the one before it. Each
saves a tensor, if an empty one: activation checkpointing, which runs the forward again as far as something was saved,
then takes all steps again on every rank, also on one that computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Forward = Callable[..., tuple[torch.Tensor, ...]]
Backward = Callable[..., tuple[torch.Tensor, ...]]


class Steps:
    """Takes steps, one after the other; without `grad` a step is its forward and nothing is kept."""

    __slots__ = ("_last", "grad")

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self._last: torch.Tensor | None = None

    def take(self, forward: Forward, backward: Backward, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`forward(*tensors)`; `backward(*gradients of the answer)` gives those of the tensors."""
        if not self.grad:
            return forward(*tensors)
        self._last, *answer = _Step.apply(forward, backward, self._last, *tensors)  # type: ignore[no-untyped-call]
        return tuple(answer)


class _Step(torch.autograd.Function):
    """The first answer holds nothing: the next step takes it, so that it depends on this one."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, last: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.backward_step = backward
        if last is not None:
            ctx.save_for_backward(last)
        like = tensors[0] if last is None else last
        return like.new_empty(0), *forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor, *grads: torch.Tensor) -> Any:
        last = ctx.saved_tensors  # nothing, for the first step
        return None, None, *(last or (None,)), *ctx.backward_step(*grads)
