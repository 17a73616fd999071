"""Which backend is soonest done with small calls, made one after another? The automatic choice beside each by name.

python benchmarks/cuda/small.py [--out DIR] [--small]

A small call is bound by the host, so that what counts is the wall time of many in a row, the last waited for.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from _ours import ours, route
from _peers import offered
from _record import Asked, Record, arguments
from training import both

from polyattn.bench.timing import Timings


class Size(NamedTuple):
    """Tokens of queries and of keys, heads, head dim; one sample."""

    queries: int
    keys: int
    heads: int
    head_dim: int


#: From what the host needs longest for to what keeps the device busy.
SIZES = (
    *(Size(tokens, tokens, 2, 64) for tokens in (64, 256, 1024)),
    *(Size(tokens, tokens, 12, 64) for tokens in (77, 256, 512, 1024, 2048)),
    *(Size(tokens, tokens, 24, 128) for tokens in (128, 256, 512, 1024, 2048)),
    Size(1024, 77, 16, 64),
    Size(4096, 77, 10, 64),
    Size(1, 2048, 32, 128),
)
INFERENCE = ("fa3", "cudnn", "torch_varlen", "triton", "sdpa")
TRAINING = ("fa3", "cudnn", "sdpa")
#: The automatic choice may be this much slower than the best one that is named.
CLOSE = 1.1
ROUNDS, CALLS = 9, 60


def main() -> int:
    """Inference at every size, then forward and backward together."""
    asked = arguments(__doc__)
    torch.set_num_threads(1)
    record = Record("small calls, made one after another", asked.small)
    sizes = SIZES[:2] if asked.small else SIZES
    for size in sizes:
        with torch.no_grad():
            compare(asked, record, f"inference {_words(size)}", _inference(asked, size), INFERENCE)
    for size in sizes:
        compare(asked, record, f"training {_words(size)}", _training(asked, size), TRAINING)
    return record.end(__file__, asked.out)


def compare(
    asked: Asked, record: Record, name: str, made: Callable[[str | None], Callable[[], Any]], backends: tuple[str, ...]
) -> None:
    """One size: every backend that takes it, and the automatic choice."""
    named = offered(record, {f"{name}: {backend}": lambda backend=backend: made(backend) for backend in backends})
    calls = {"automatic": made(None)} | {key.rpartition(" ")[2]: call for key, call in named.items()}
    timings = in_a_row(calls, asked.device, rounds=2 if asked.small else ROUNDS)
    record.compare(name, timings, "automatic", route=route(calls["automatic"]))
    others = [other for other in calls if other != "automatic"]
    best = max((timings.ratio("automatic", other) for other in others), default=None)
    record.target(f"{name}: automatic / the best", best, at_most=CLOSE)


def in_a_row(calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> Timings:
    """Milliseconds a call, of `CALLS` calls until the device is done with them: a value a round."""
    synchronize = torch.get_device_module(device).synchronize
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            found = []
            for _ in range(3):
                synchronize()
                start = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                synchronize()
                found.append((time.perf_counter_ns() - start) / CALLS / 1e6)
            if number > 0:  # the first warms up
                taken[name].append(statistics.median(found))
    return Timings({name: tuple(values) for name, values in taken.items()})


def _inference(asked: Asked, size: Size) -> Callable[[str | None], Callable[[], Any]]:
    q, k, v = _tensors(asked, size)
    return lambda backend: ours(q, k, v, backend=backend)


def _training(asked: Asked, size: Size) -> Callable[[str | None], Callable[[], Any]]:
    inputs = [tensor.requires_grad_() for tensor in _tensors(asked, size)]
    upstream = torch.randn_like(inputs[0])
    return lambda backend: both(ours(*inputs, backend=backend), inputs, upstream)


def _tensors(asked: Asked, size: Size) -> list[torch.Tensor]:
    shape = (size.heads, size.head_dim)
    return [
        torch.randn(1, rows, *shape, device=asked.device, dtype=asked.dtype)
        for rows in (size.queries, size.keys, size.keys)
    ]


def _words(size: Size) -> str:
    return f"{size.queries} x {size.keys}, {size.heads} heads of {size.head_dim}"


if __name__ == "__main__":
    sys.exit(main())
