"""The same call, made by a compiled graph."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.call import attention


def attend_compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    """`attention` in one graph without a break; its operators' shapes and gradients are traced, no code is generated.

    Arguments and result are those of `attention`. Each call is a graph of its own: what Dynamo holds is dropped before.
    """

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, **arguments)

    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)(q, k, v)
