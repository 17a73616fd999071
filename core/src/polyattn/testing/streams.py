"""Calls on two streams at the same time, which must not share what they work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from polyattn.testing.asking import Asked, ask
from polyattn.testing.running import Answer, Trial, run
from polyattn.testing.targets import Target

#: Calls on each stream, and the rows of the square product that keeps both busy until all of them are queued.
_CALLS, _BUSY = 4, 8192


def at_once(asked: Asked, target: Target) -> Iterator[Trial]:
    """The call and one on other numbers, of one structure, in turn on two streams; every answer is a trial."""
    module: Any = torch.get_device_module(target.device)
    other = ask(asked.case, target, asked.dtype, numbers="other numbers")
    pair = (asked, replace(other, call=replace(other.call, structure=asked.call.structure)))
    if asked.call.structure is not None:
        asked.call.structure.to(target.device)
    busy = torch.ones(_BUSY, _BUSY, device=target.device)
    for one in pair:
        run(one)
    module.synchronize()
    streams = (module.Stream(), module.Stream())
    for stream in streams:
        with module.stream(stream):
            torch.mm(busy, busy)
    answers: list[tuple[Asked, Answer]] = []
    for _ in range(_CALLS):
        for stream, one in zip(streams, pair, strict=True):
            with module.stream(stream):
                answers.append((one, run(one)))
    module.synchronize()
    for one, answer in answers:
        yield Trial(one, answer)
