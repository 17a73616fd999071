"""A call captured in a device graph: replayed on other numbers and lengths, and refused while nothing is ready."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyattn.errors import BackendUnavailable, UnsupportedRequest
from polyattn.testing.asking import Asked
from polyattn.testing.cases import Call
from polyattn.testing.integrity import change_problems, contents
from polyattn.testing.running import Answer, Trial, run
from polyattn.testing.targets import Target


def record(device: torch.device, call: Callable[[], Answer]) -> tuple[Answer, Callable[[], None]]:
    """`call`, captured in a graph of this device, and what replays it."""
    module: Any = torch.get_device_module(device)
    graph = getattr(module, f"{device.type.upper()}Graph")()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .*Graph is empty")  # a call that raises leaves it so
        with module.graph(graph):
            answer = call()
    return answer, graph.replay


def replayed(asked: Asked, target: Target) -> Iterator[Trial]:
    """Ready the structure, call once, capture; then replay on other numbers, and again on other lengths.

    A trial is to be judged before the next one: it is the graph's own memory.
    """
    call, build = asked.call, asked.case.build
    if call.structure is not None:
        call.structure.to(target.device)
    run(asked)
    answer, replay = record(target.device, lambda: run(asked))

    def with_other_lengths(make: Any) -> Call:
        return build(make) if asked.case.replay is None else asked.case.replay(make, call)

    for numbers, other in (("other numbers", build), ("other lengths", with_other_lengths)):
        new = other(target.maker(f"{asked.case.name} {numbers}", asked.dtype))
        for name in ("q", "k", "v") if call.gate is None else ("q", "k", "v", "gate"):
            getattr(call, name).copy_(getattr(new, name))
        answer.out.fill_(float("nan"))  # a graph without the kernel leaves it so
        before = contents(call)
        replay()
        yield Trial(asked, answer, tuple(change_problems(before, call)))


def cold_problems(asked: Asked, target: Target) -> list[str]:
    """What is wrong with a first call inside a capture: it must raise, and say what readies the structure."""
    try:
        record(target.device, lambda: run(asked))
    except (UnsupportedRequest, BackendUnavailable):
        raise
    except RuntimeError as error:
        told = [str(error), str(error.__context__)]  # ending the capture may have failed on top of it
        if any("structure.to(" in text for text in told):
            return []
        return [f"a cold capture raised without naming structure.to(device): {error}"]
    return ["a cold capture went through, with a structure that was never sent to the device"]
