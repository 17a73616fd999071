"""Shared by the benchmarks: interleaved timing, the machine's facts, and the one way results are kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


Samples = dict[str, list[float]]


def interleaved(calls: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float) -> Samples:
    """Microseconds a call of each, one sample a round, measured in turns so that all share the machine's moods.

    Each turn of a call lasts about `seconds`.
    """
    repeats = {name: _repeats(call, seconds) for name, call in calls.items()}
    samples: Samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.perf_counter() - start) / repeats[name] * 1e6)
    return samples


def medians(samples: Samples) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(taken) for name, taken in samples.items()}


def added(samples: Samples, name: str, base: str) -> float:
    """How much longer `name` takes than `base`: the median of the rounds' differences."""
    return statistics.median(a - b for a, b in zip(samples[name], samples[base], strict=True))


def _repeats(call: Callable[[], object], seconds: float) -> int:
    call()
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds / 4 or count < 2:
        call()
        count += 1
    return max(1, round(seconds / (spent / count)))


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def raw(samples: Samples) -> dict[str, list[float]]:
    """The samples as they are kept: four digits tell enough."""
    return {name: [float(f"{value:.4g}") for value in taken] for name, taken in samples.items()}


def report(name: str, result: Mapping[str, Any], *, write: bool) -> int:
    """Print the result as JSON, keep it under results/ if asked to, and return 1 if a target in it is missed."""
    text = json.dumps({"machine": machine_facts(), **result}, indent=2)
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")
    missed = [target for target, state in result.get("targets", {}).items() if not state["met"]]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def target(value: float, *, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """A measured value beside its limit."""
    met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    limit = {"at_most": at_most} if at_most is not None else {"at_least": at_least}
    return {"value": round(value, 3), **limit, "met": met}
