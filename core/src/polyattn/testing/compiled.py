"""The same call, made by a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from polyattn.call import attention


def attend_compiled(inside: Callable[[], AbstractContextManager[Any]] | None) -> Callable[..., Any]:
    """What is called like `attention`, in one graph without a break; `inside` the graph is around the call.

    The operators' shapes and gradients are traced, no code is generated. Each call is a graph of its own: what Dynamo
    holds is dropped before.
    """

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if inside is None:
                return attention(q, k, v, **arguments)
            with inside():
                return attention(q, k, v, **arguments)

        torch.compiler.reset()
        return torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)(q, k, v)

    return attend
