"""Functions that torch.compile runs as they are: a graph ends before them, and the next one begins behind them.

What ranks agree on, and in which order they communicate, is decided on the host, call by call; nothing of it can be in
a graph. `torch.compiler.disable` would do, but it loads the compiler, which takes seconds, whether it is used or not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_WHY = "polyattn: ranks communicate outside of compiled graphs"


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function, of which a compiler sees nothing: neither it nor what it calls."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(compiler.disable(function))
        return disabled[0](*args, **kwargs)

    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_WHY)
    return call


@uncompiled
def attend_between_graphs(
    stated: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> Any:
    """The call over ranks that a compiled model makes; `stated`: what all its ordinary calls have in common."""
    from polyattn.distributed.entry import attend_over_ranks
    from polyattn.distributed.local import LocalCall

    return attend_over_ranks(LocalCall(*stated), q, k, v, **arguments)
