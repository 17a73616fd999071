"""Who is told of the attention calls of a thread, while a `BreakableGraph` looks at its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch

from polyattn.structures.base import Structure

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Recorder(Protocol):
    """Makes an attention call in its own way."""

    def attention(
        self, call: Callable[..., Any], qkv: Tensors, stated: dict[str, Any], about: Mapping[str, Any]
    ) -> Any:
        """Answer as `call(*qkv, **stated)` does; `about` is all that the call asks for, a layer's arguments too."""

    def compiled(self, structure: Structure | None) -> None:
        """Compiled code is about to make a call; raise UnsupportedRequest where it must not."""


#: Thread -> its recorder; empty but for the moments of a warm-up and of a capture, so that a call looks at no more.
recorders: dict[int, Recorder] = {}


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """This thread's attention calls go to `recorder`."""
    thread = get_ident()
    if thread in recorders:
        raise RuntimeError(
            "a BreakableGraph is captured inside the capture of another one: capture the outer one alone"
        )
    recorders[thread] = recorder
    try:
        yield
    finally:
        recorders.pop(thread, None)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, this thread's calls are made as ever."""
    thread = get_ident()
    recorder = recorders.pop(thread)
    try:
        yield
    finally:
        recorders[thread] = recorder


def here() -> Recorder | None:
    """This thread's recorder, if any."""
    return recorders.get(get_ident())
