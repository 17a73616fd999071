"""Interleaved timing of calls on a device: rounds in which every candidate has its turn, and ratios within rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch

Call = Callable[[], object]

#: A sample holds as many calls as it takes to last about this long: event timers tick in half microseconds.
_SAMPLE_MS = 0.2
_MOST_CALLS = 64
#: Looking at the host's time of long calls ends after so long; no lead is longer.
_LONG_SECONDS = 0.05
_LONGEST_LEAD_MS = 1.0
#: More than the last-level cache of any device so far.
_FLUSHED_BYTES = 256 * 2**20


class Clock(Protocol):
    """How time is taken on one kind of device."""

    def samples(self, call: Call, count: int, inner: int, lead_ms: float) -> list[float]:
        """`count` samples in milliseconds a call, each over `inner` calls in a row.

        Before each sample the caches are flushed, and the device is kept busy for `lead_ms`, so that the host is ahead
        and what is measured is the device.
        """
        ...

    def host_ms(self, call: Call) -> float:
        """Milliseconds that the host needs to issue the call, with nothing queued before it."""
        ...


class HostClock:
    """The processor's own calls: they are done when they return."""

    def samples(self, call: Call, count: int, inner: int, lead_ms: float) -> list[float]:
        """Wall time; caches are left as they are, as they are in use."""
        return [_wall_ms(call, inner) for _ in range(count)]

    def host_ms(self, call: Call) -> float:
        """Nothing is queued, so that no lead is ever needed."""
        return 0.0


class DeviceClock:
    """A device with streams and events, through torch's module of its type."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._cache = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
        self._flush_ms = max(statistics.median(self._timed(self._cache.zero_, 1) for _ in range(5)), 1e-3)

    def samples(self, call: Call, count: int, inner: int, lead_ms: float) -> list[float]:
        """Time between events around the calls; all samples are queued, then read at once."""
        flushes = max(1, ceil(lead_ms / self._flush_ms))
        taken = []
        for _ in range(count):
            start, end = (self._module.Event(enable_timing=True) for _ in range(2))
            for _ in range(flushes):
                self._cache.zero_()
            start.record()
            for _ in range(inner):
                call()
            end.record()
            taken.append((start, end))
        self._module.synchronize()
        return [start.elapsed_time(end) / inner for start, end in taken]

    def host_ms(self, call: Call) -> float:
        """The least of a few, each with an idle queue; a call that waits for the device needs no lead."""
        found: list[float] = []
        begun = time.perf_counter()
        while len(found) < 5 and time.perf_counter() - begun < _LONG_SECONDS:
            self._module.synchronize()
            found.append(_wall_ms(call, 1))
        self._module.synchronize()
        return min(*found, _LONGEST_LEAD_MS)

    def _timed(self, call: Call, inner: int) -> float:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            call()
        end.record()
        self._module.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed / inner


def clock_of(device: torch.device) -> Clock:
    """The clock for calls on this device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass(frozen=True)
class Timings:
    """Milliseconds a call of each candidate: one value a round, the median of that round's samples."""

    rounds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Over all rounds."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """Its time over that of `base`: the median of the rounds' ratios, for a round shares the clock's moods."""
        pairs = zip(self.rounds[name], self.rounds[base], strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    def fastest(self) -> str:
        """The candidate with the least median."""
        return min(self.rounds, key=self.median)

    def as_dict(self) -> dict[str, list[float]]:
        """The raw rounds, five digits each; JSON-ready."""
        return {name: [float(f"{taken:.5g}") for taken in rounds] for name, rounds in self.rounds.items()}


def interleaved(calls: Mapping[str, Call], clock: Clock, *, seconds: float, rounds: int = 7) -> Timings:
    """Time the calls in turns, for about `seconds` in all; each has been called before the first round.

    The order turns round every round, so that nobody always follows the same one. Calls so long that the time does not
    suffice for all rounds get at least three.
    """
    paces = {name: _pace(call, clock) for name, call in calls.items()}
    least = sum(pace.sample_ms for pace in paces.values())
    rounds = max(3, min(rounds, int(seconds * 1e3 / max(least, 1e-9))))
    turn_ms = seconds * 1e3 / rounds / max(len(calls), 1)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in names:
            pace = paces[name]
            count = max(1, min(200, int(turn_ms / pace.sample_ms)))
            taken[name].append(statistics.median(clock.samples(calls[name], count, pace.inner, pace.lead_ms)))
    return Timings({name: tuple(found) for name, found in taken.items()})


@dataclass(frozen=True)
class _Pace:
    inner: int
    lead_ms: float
    sample_ms: float


def _pace(call: Call, clock: Clock) -> _Pace:
    """Warm up, and see how many calls a sample needs and how far ahead the host must be."""
    for _ in range(2):
        call()
    host_ms = clock.host_ms(call)
    (call_ms,) = clock.samples(call, 1, 1, host_ms)
    inner = max(1, min(_MOST_CALLS, ceil(_SAMPLE_MS / max(call_ms, 1e-6))))
    lead_ms = 1.5 * inner * host_ms
    if inner > 1:
        call_ms = statistics.median(clock.samples(call, 3, inner, lead_ms))
    return _Pace(inner, lead_ms, inner * call_ms + lead_ms)


def _wall_ms(call: Call, inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - start) * 1e3 / inner
