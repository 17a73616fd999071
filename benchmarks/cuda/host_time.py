"""How long does the host take to issue a tiny call (64 tokens, 2 heads, D 64), with nothing queued before it?

python benchmarks/cuda/host_time.py [--out DIR] [--small]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from _ours import ours, route
from _peers import fa3, fa3_wrapper, offered, sdpa
from _record import Record, arguments

import polyattn as pa
from polyattn.bench.timing import Timings

LIMITS_US = {"polyattn inference": 30.0, "polyattn with grad": 45.0, "polyattn compiled": 45.0}
ROUNDS, CALLS = 15, 100

Call = Callable[[], Any]
Mode = Callable[[], AbstractContextManager[None]]


def main() -> int:
    """Measure on one thread, in turns."""
    asked = arguments(__doc__)
    torch.set_num_threads(1)
    record = Record("host time of a tiny call", asked.small)
    q, k, v = (torch.randn(1, 64, 2, 64, device=asked.device, dtype=asked.dtype) for _ in range(3))
    learned = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    layer = pa.Attention(2, 64)
    compiled = torch.compile(lambda q, k, v: pa.attention(q, k, v), fullgraph=True)
    compiled_sdpa = torch.compile(lambda q, k, v: sdpa(q, k, v)(), fullgraph=True)
    inference = {
        "polyattn inference": lambda: ours(q, k, v),
        "polyattn layer": lambda: lambda: layer(q, k, v),
        "polyattn fa3": lambda: ours(q, k, v, backend="fa3"),
        "polyattn compiled": lambda: lambda: compiled(q, k, v),
        "fa3 raw": lambda: fa3(q, k, v),
        "fa3 wrapper": lambda: fa3_wrapper(q, k, v),
        "torch sdpa": lambda: sdpa(q, k, v),
        "torch sdpa compiled": lambda: lambda: compiled_sdpa(q, k, v),
    }
    training = {"polyattn with grad": lambda: ours(*learned), "torch sdpa with grad": lambda: sdpa(*learned)}
    with torch.no_grad():
        calls = {name: (call, torch.no_grad) for name, call in offered(record, inference).items()}
    calls |= {name: (call, torch.enable_grad) for name, call in offered(record, training).items()}
    timings = issued(calls, asked.device, rounds=3 if asked.small else ROUNDS)
    routes = {}
    for name in ("polyattn inference", "polyattn with grad"):
        call, mode = calls[name]
        with mode():
            routes[name] = route(call)
    record.compare("milliseconds of the host", timings, "torch sdpa", routes=routes)
    for name, limit in LIMITS_US.items():
        value = timings.median(name) * 1e3 if name in calls else None
        record.target(f"{name}, us", value, at_most=limit)
    return record.end(__file__, asked.out)


def issued(calls: Mapping[str, tuple[Call, Mode]], device: torch.device, rounds: int) -> Timings:
    """Milliseconds until each call returns, the device idle at its start: a median a round."""
    synchronize = torch.get_device_module(device).synchronize
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, (call, mode) in calls.items():
            found = []
            with mode():
                for _ in range(CALLS):
                    synchronize()
                    start = time.perf_counter_ns()
                    call()
                    found.append((time.perf_counter_ns() - start) / 1e6)
            if number > 0:  # the first warms up
                taken[name].append(statistics.median(found))
    return Timings({name: tuple(values) for name, values in taken.items()})


if __name__ == "__main__":
    sys.exit(main())
