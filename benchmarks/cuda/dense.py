"""Is polyattn's dense attention as fast as raw FlashAttention-3, with the same launches, and how far ahead of torch?

python benchmarks/cuda/dense.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys

import torch
from _kernels import launched
from _ours import ours, route
from _peers import fa3, offered, sdpa
from _record import Asked, Record, arguments
from torch.nn.attention import SDPBackend

from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import Clock, clock_of, interleaved

#: Rounds of each shape: a call of the last takes a fifth of a second.
ROUNDS = {"flux": 9, "wan480": 5, "wan720": 3}


def main() -> int:
    """Measure the three shapes."""
    asked = arguments(__doc__)
    record = Record("dense attention beside raw FA3 and torch", asked.small)
    clock = clock_of(asked.device)
    with torch.inference_mode():
        for name, rounds in ROUNDS.items():
            measure(name, rounds, asked, record, clock)
    return record.end(__file__, asked.out)


def measure(name: str, rounds: int, asked: Asked, record: Record, clock: Clock) -> None:
    """One shape: times, ratios, launches."""
    work = workload_of(name, asked.device, asked.dtype, small=asked.small)
    q, k, v = work.q, work.k, work.v
    mine = ours(q, k, v)
    peers = offered(
        record,
        {
            "fa3 raw": lambda: fa3(q, k, v),
            "cudnn": lambda: sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION),
            "torch flash": lambda: sdpa(q, k, v, SDPBackend.FLASH_ATTENTION),
        },
    )
    timings = interleaved({"polyattn": mine, **peers}, clock, seconds=asked.seconds, rounds=rounds)
    kernels = {one: launched(call, asked.device) for one, call in {"polyattn": mine, **peers}.items()}
    base = "fa3 raw" if "fa3 raw" in peers else "polyattn"
    tflops = {one: float(f"{work.flops / timings.median(one) / 1e9:.4g}") for one in timings.rounds}
    title = f"{name}: {SHAPES[name].title}"
    record.compare(title, timings, base, route=route(mine), tflops=tflops, kernels=kernels)
    raw, flash = (peer if peer in peers else None for peer in ("fa3 raw", "torch flash"))
    record.target(f"{name}: polyattn / fa3 raw", raw and timings.ratio("polyattn", raw), at_most=1.02)
    record.target(f"{name}: torch flash / polyattn", flash and timings.ratio(flash, "polyattn"), at_least=1.85)
    same = float(kernels["polyattn"] != kernels["fa3 raw"]) if raw and kernels[raw] is not None else None
    record.target(f"{name}: launches that differ from fa3 raw", same, at_most=0.0)


if __name__ == "__main__":
    sys.exit(main())
