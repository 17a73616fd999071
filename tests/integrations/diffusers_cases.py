"""A diffusers model to compare: how it is built, what it is given, and how far polyattn is from diffusers' own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from polyattn.integrations.diffusers import use_polyattn

#: Text tokens and samples of every input.
TEXT, BATCH = 8, 2
#: float32, with outputs and gradients of size one: some rounding errors of a few layers.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A model class and a configuration; `padded` are the arguments that make some tokens padding."""

    cls: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    padded: Callable[[], dict[str, Any]] | None = None
    note: str = ""

    def __str__(self) -> str:
        return f"{self.cls} ({self.note})" if self.note else self.cls

    def build(self) -> Any:
        """The model, with weights that a seed decides and no parameter all zero, as final layers start."""
        torch.manual_seed(0)
        model = getattr(diffusers, self.cls)(**self.config).eval()
        for parameter in model.parameters():
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    def arguments(self, padded: bool) -> dict[str, Any]:
        """What the model is given, the same each time; what is floating and has several axes wants a gradient."""
        torch.manual_seed(1)
        given = self.inputs() | ((self.padded or dict)() if padded else {})
        return {name: _wanting_gradient(value) for name, value in given.items()} | {"return_dict": False}


@dataclass(frozen=True)
class Outcome:
    """A forward and its backward: the outputs, and the gradients of parameters and inputs, scaled to size one."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]


def outcome(model: Any, arguments: dict[str, Any], scope: AbstractContextManager[Any]) -> Outcome:
    """What a model makes of some arguments in a scope."""
    with scope:
        outputs = tuple(_floating(model(**arguments)))
        inputs = [tensor for tensor in _floating(arguments) if tensor.requires_grad]
        wanted = [*model.parameters(), *inputs]
        found = torch.autograd.grad(sum(out.square().mean() for out in outputs), wanted, allow_unused=True)
    gradients = [torch.zeros_like(to) if grad is None else grad for to, grad in zip(wanted, found, strict=True)]
    size = max(grad.abs().max() for grad in gradients)
    return Outcome(tuple(out.detach() for out in outputs), tuple(grad / size for grad in gradients))


def difference(theirs: tuple[torch.Tensor, ...], ours: tuple[torch.Tensor, ...]) -> float:
    """The largest absolute difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))


def both(case: Case, padded: bool) -> tuple[Outcome, Outcome]:
    """What the model makes of its arguments with diffusers' own attention, and with ours."""
    model = case.build()
    theirs = outcome(model, case.arguments(padded), nullcontext())
    return theirs, outcome(model, case.arguments(padded), use_polyattn(model))


def keep(*lengths: int, total: int = TEXT) -> torch.Tensor:
    """bool [B, total]: the first so many keys of each row."""
    return torch.arange(total) < torch.tensor(lengths)[:, None]


def text(width: int) -> torch.Tensor:
    """Embeddings of the text."""
    return torch.randn(BATCH, TEXT, width)


def steps() -> torch.Tensor:
    """A continuous time for each sample."""
    return torch.tensor((0.3, 0.8))


def _wanting_gradient(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2:
        return value.requires_grad_()
    return value


def _floating(value: Any) -> list[torch.Tensor]:
    """The floating tensors in a model's output or arguments."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _floating(part)]
