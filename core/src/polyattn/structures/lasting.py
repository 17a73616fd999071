"""What structures keep is made outside of inference mode: autograd refuses inference tensors in every later call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def lasting(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, run outside of inference mode."""

    @wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside


@lasting
def normal(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, unless it is an inference tensor: then a normal one over the same memory."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    if type(tensor) is not torch.Tensor:  # a subclass (a fake tensor) may have no memory to share
        return tensor.clone()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
