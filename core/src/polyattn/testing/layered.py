"""The same call, made by a layer that knows its place in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.layer import Attention

_OF_LAYER = ("causal", "scale", "window", "softcap", "backend", "quant", "deterministic")


def attend_in_layer(index: int) -> Callable[..., Any]:
    """What is called like `attention`, through an `Attention` whose prefix names this index."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        own = {name: arguments.pop(name) for name in _OF_LAYER if name in arguments}
        layer = Attention(q.shape[-2], q.shape[-1], k.shape[-2], prefix=f"blocks.{index}.attention", **own)
        return layer(q, k, v, **arguments)

    return call
