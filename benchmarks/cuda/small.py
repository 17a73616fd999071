"""Which backend is soonest done with small calls, made one after another? The automatic choice beside each by name.

python benchmarks/cuda/small.py [--out DIR] [--small]

A small call is bound by the host, so that what counts is the wall time of many in a row, the last waited for; in a
graph the device alone counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from _ours import ours, route
from _peers import offered
from _record import Asked, Record, arguments
from training import both

import polyattn as pa
from polyattn.bench.timing import Timings

Call = Callable[[], Any]


class Size(NamedTuple):
    """Tokens of queries and of keys, heads, head dim; one sample."""

    queries: int
    keys: int
    heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {self.heads} heads of {self.head_dim}"


#: From what the host needs longest for to what keeps the device busy.
DENSE = (
    *(Size(tokens, tokens, 2, 64) for tokens in (64, 1024, 4096)),
    *(Size(tokens, tokens, 12, 64) for tokens in (77, 512, 1024, 2048, 4096)),
    Size(8192, 8192, 24, 64),
    *(Size(tokens, tokens, 24, 128) for tokens in (128, 512, 640, 768, 1024, 2048)),
    Size(2048, 2048, 2, 128),
    Size(1024, 77, 16, 64),
    Size(4096, 77, 10, 64),
    Size(4096, 512, 24, 128),
    Size(64, 2048, 8, 128),
    Size(1, 1024, 32, 128),
    Size(1, 4096, 32, 128),
)
STRUCTURED = (Size(77, 77, 12, 64), Size(512, 512, 24, 128), Size(1024, 1024, 12, 64), Size(1024, 1024, 24, 128))
TRAINED = (
    Size(64, 64, 2, 64), Size(1024, 1024, 12, 64), Size(4096, 77, 10, 64), Size(512, 512, 24, 128),
    Size(1024, 1024, 24, 128), Size(2048, 2048, 24, 128), Size(4096, 4096, 24, 128),
)  # fmt: skip
FORWARD = ("fa3", "cudnn", "triton", "sdpa")
TRAINING = ("fa3", "cudnn", "sdpa")
#: The automatic choice may be this much slower than the best one that is named.
CLOSE = 1.1
ROUNDS, CALLS, CAPTURED = 9, 60, 20
#: A sample of long calls holds fewer of them, in seconds.
LONGEST = 0.005


def main() -> int:
    """Each kind of call at every size."""
    asked = arguments(__doc__)
    torch.set_num_threads(1)
    record = Record("small calls, made one after another", asked.small)
    with torch.no_grad():
        for size in DENSE[:2] if asked.small else DENSE:
            compare(asked, record, "dense", size, partial(ours, *tensors(asked, size)), FORWARD)
        for size in STRUCTURED[:1] if asked.small else STRUCTURED:
            kept = pa.KeyPadding.from_lengths([size.keys, size.keys * 3 // 4], size.keys)
            padded = partial(ours, *tensors(asked, size, samples=2), kept)
            compare(asked, record, "two samples, one padded", size, padded, FORWARD)
            documents = pa.Packed.from_lengths([size.keys // 4, size.keys - size.keys // 4])
            rows = [tensor[0] for tensor in tensors(asked, size)]
            compare(asked, record, "two documents", size, partial(ours, *rows, documents), FORWARD)
        if asked.device.type != "cpu":
            for size in DENSE:
                made = partial(captured, partial(ours, *tensors(asked, size)))
                compare(asked, record, "in a graph", size, made, FORWARD, share=CAPTURED)
    for size in TRAINED[:1] if asked.small else TRAINED:
        compare(asked, record, "forward and backward", size, partial(trained, asked, size), TRAINING)
    return record.end(__file__, asked.out)


def compare(
    asked: Asked,
    record: Record,
    kind: str,
    size: Size,
    made: Callable[..., Call],
    backends: tuple[str, ...],
    *,
    share: int = 1,
) -> None:
    """One size: every backend that takes it, and the automatic choice; each call is `share` attention calls."""
    name = f"{kind}, {size}"
    automatic = made(backend=None)
    named = offered(record, {f"{name}: {backend}": partial(made, backend=backend) for backend in backends})
    candidates = {"automatic": automatic} | {key.rpartition(" ")[2]: call for key, call in named.items()}
    timings = in_a_row(candidates, asked.device, rounds=2 if asked.small else ROUNDS, share=share)
    facts = {} if share > 1 else {"route": route(automatic)}
    record.compare(name, timings, "automatic", kind=kind, size=list(size), **facts)
    others = [other for other in candidates if other != "automatic"]
    best = max((timings.ratio("automatic", other) for other in others), default=None)
    record.target(f"{name}: automatic / the best", best, at_most=CLOSE)


def in_a_row(candidates: Mapping[str, Call], device: torch.device, *, rounds: int, share: int) -> Timings:
    """Milliseconds an attention call, of up to `CALLS` in a row until the device is done with them: a value a round."""
    synchronize = torch.get_device_module(device).synchronize
    first = next(iter(candidates.values()))
    first()
    synchronize()
    start = time.perf_counter()
    first()
    synchronize()
    calls = max(2, min(CALLS // share, int(LONGEST / (time.perf_counter() - start))))
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, call in candidates.items():
            found = []
            for _ in range(3):
                synchronize()
                start = time.perf_counter_ns()
                for _ in range(calls):
                    call()
                synchronize()
                found.append((time.perf_counter_ns() - start) / calls / share / 1e6)
            if number > 0:  # the first warms up
                taken[name].append(statistics.median(found))
    return Timings({name: tuple(values) for name, values in taken.items()})


def captured(made: Callable[..., Call], *, backend: str | None) -> Call:
    """`CAPTURED` calls in a graph."""
    call = made(backend=backend)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            call()
    return graph.replay


def trained(asked: Asked, size: Size, *, backend: str | None) -> Call:
    """Forward and backward."""
    inputs = [tensor.requires_grad_() for tensor in tensors(asked, size)]
    return both(ours(*inputs, backend=backend), inputs, torch.randn_like(inputs[0]))


def tensors(asked: Asked, size: Size, samples: int = 1) -> list[torch.Tensor]:
    """q, k and v of a size."""
    return [
        torch.randn(samples, rows, size.heads, size.head_dim, device=asked.device, dtype=asked.dtype)
        for rows in (size.queries, size.keys, size.keys)
    ]


if __name__ == "__main__":
    sys.exit(main())
