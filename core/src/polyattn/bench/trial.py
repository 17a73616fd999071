"""A trial: every backend that takes a workload, timed in turns, and why the others were not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from polyattn.bench.shapes import Workload
from polyattn.bench.timing import Clock, Timings, interleaved
from polyattn.call import attention
from polyattn.discovery import backends_of
from polyattn.environment import PolyattnWarning
from polyattn.explanation import explain
from polyattn.vendor import Platform, Request

#: A backend whose first timed call takes so many times the fastest one's is told by that call alone.
_HOPELESS = 20.0


@dataclass(frozen=True)
class Trial:
    """What came of one workload.

    timings      of the backends that ran in turns; None where none did
    routes       backend -> the route that ran: "cuda:fa3", "pack(cuda:fa3)"
    once         backend -> milliseconds of its only call: it is too slow to be worth more
    refused      backend -> why it was not timed
    request      as routing saw it; None where no backend ran
    """

    timings: Timings | None
    routes: dict[str, str]
    once: dict[str, float]
    refused: dict[str, str]
    request: Request | None
    flops: int = 0

    def milliseconds(self) -> dict[str, float]:
        """Backend -> median, fastest first; those with one call follow where their time puts them."""
        taken = dict(self.once)
        if self.timings is not None:
            taken |= {name: self.timings.median(name) for name in self.timings.rounds}
        return dict(sorted(taken.items(), key=lambda item: item[1]))

    def ratios(self) -> dict[str, float]:
        """Backend -> its time over the fastest one's: the median of the rounds' ratios where there are rounds."""
        taken = self.milliseconds()
        if not taken:
            return {}
        first = next(iter(taken))
        rounds = self.timings.rounds if self.timings is not None else {}
        return {
            name: self.timings.ratio(name, first)
            if self.timings is not None and name in rounds and first in rounds
            else ms / taken[first]
            for name, ms in taken.items()
        }

    def tflops(self, name: str) -> float:
        """Teraflops a second of one backend."""
        return self.flops / self.milliseconds()[name] / 1e9


@dataclass
class _Ready:
    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    request: Request | None = None


def try_backends(
    work: Workload, platform: Platform, clock: Clock, *, seconds: float, names: Collection[str] = (), rounds: int = 7
) -> Trial:
    """Time the platform's backends on this workload for about `seconds`.

    `names` are the backends wanted, slow generic routes too; without them all are tried that need no slow one. A
    backend that raises is told as refused, in its own words.
    """
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolyattnWarning)
        ready = _Ready()
        for backend in backends_of(platform):
            if not names or backend.name in names:
                _prepare(ready, work, backend.name, slow=bool(names))
        first = {name: taken for name in list(ready.calls) if (taken := _first(ready, name, clock)) is not None}
        limit = _HOPELESS * min(first.values(), default=0.0)
        once = {name: taken for name, taken in first.items() if taken > limit}
        calls = {name: ready.calls[name] for name in first if name not in once}
        timings = interleaved(calls, clock, seconds=seconds, rounds=rounds) if calls else None
    return Trial(timings, ready.routes, once, ready.refused, ready.request, work.flops)


def _prepare(ready: _Ready, work: Workload, name: str, *, slow: bool) -> None:
    told = explain(work.q, work.k, work.v, structure=work.structure, causal=work.causal, backend=name)
    if told.chosen is None:
        reasons = {decision.backend.name: getattr(decision, "reasons", ()) for decision in told.decisions}
        ready.refused[name] = "; ".join(reasons.get(name, ())) or str(told.refusal)
    elif told.chosen.slow and not slow:
        ready.refused[name] = f"only through {told.chosen.name}, a slow generic route"
    else:
        ready.request = told.request
        ready.routes[name] = told.chosen.name
        ready.calls[name] = partial(
            attention, work.q, work.k, work.v, structure=work.structure, causal=work.causal, backend=name
        )


def _first(ready: _Ready, name: str, clock: Clock) -> float | None:
    """Milliseconds of the second call, once it has compiled; None, and told as refused, where it raises."""
    call: Callable[[], Any] = ready.calls[name]
    try:
        call()
        return clock.samples(call, 1, 1, 0.0)[0]
    except Exception as error:  # whatever a backend raises is its own fault, and the others are still to be timed
        ready.refused[name] = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        del ready.calls[name], ready.routes[name]
        return None
