"""Video tiles on the CPU at 10% kept: is sparse attention faster than dense SDPA on 8,000 tokens and more?

python benchmarks/video_cpu.py [--write] [--rounds 5]

From raster q, k, v (and gate) to raster output: ordering, means, scores, choice and gathering are all counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from _measure import interleaved, report, target
from torch.nn.functional import scaled_dot_product_attention

import polyattn as pa

HEADS, HEAD_DIM, SPARSITY = 2, 128, 0.9

#: Name -> grid, tile, dtype, gate?, and how much faster than dense it has to be at least.
CASES: dict[str, tuple[tuple[int, int, int], tuple[int, int, int], torch.dtype, bool, float]] = {
    "8,192 tokens, tiles of 64, float32": ((8, 32, 32), (4, 4, 4), torch.float32, False, 3.0),
    "8,192 tokens, tiles of 64, bfloat16": ((8, 32, 32), (4, 4, 4), torch.bfloat16, False, 3.0),
    "8,192 tokens, tiles of 256, float32": ((8, 32, 32), (4, 8, 8), torch.float32, False, 3.0),
    "8,370 tokens, partial tiles of 64, gate, float32": ((9, 30, 31), (4, 4, 4), torch.float32, True, 2.0),
    "16,380 tokens, partial tiles of 64, gate, bfloat16": ((21, 30, 26), (4, 4, 4), torch.bfloat16, True, 3.0),
}


def main() -> int:
    """Ratios of dense to sparse, each pair measured in turns in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    milliseconds, targets = {}, {}
    for name, (grid, tile, dtype, weighted, wanted) in CASES.items():
        with torch.inference_mode():
            samples = interleaved(_calls(grid, tile, dtype, weighted), rounds=asked.rounds, seconds=0.05)
        milliseconds[name] = {call: [round(taken / 1e3, 1) for taken in rounds] for call, rounds in samples.items()}
        ratio = statistics.median(a / b for a, b in zip(samples["dense"], samples["sparse"], strict=True))
        targets[f"{name}: dense / sparse"] = target(ratio, at_least=wanted)
    facts = {"heads": HEADS, "head_dim": HEAD_DIM, "sparsity": SPARSITY}
    return report("video_cpu", facts | {"milliseconds": milliseconds, "targets": targets}, write=asked.write)


def _calls(
    grid: tuple[int, int, int], tile: tuple[int, int, int], dtype: torch.dtype, weighted: bool
) -> dict[str, Callable[[], Any]]:
    layout = pa.VideoLayout(grid)
    structure = pa.VideoTiles(layout, tile, sparsity=SPARSITY)
    q, k, v, gate = (torch.randn(1, layout.rows, HEADS, HEAD_DIM, dtype=dtype) for _ in range(4))

    def sparse() -> torch.Tensor:
        out: torch.Tensor = pa.attention(q, k, v, structure=structure, gate=gate if weighted else None)
        return out

    def dense() -> torch.Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return {"sparse": sparse, "dense": dense}


if __name__ == "__main__":
    sys.exit(main())
