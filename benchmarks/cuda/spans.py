"""Text and images, twice: does a call with spans take as long as FA3 takes for its segments, one after the other?

python benchmarks/cuda/spans.py [--out DIR] [--small]
"""

from __future__ import annotations

import statistics
import sys

import torch
from _ours import ours, route
from _peers import fa3, offered
from _record import Record, arguments

from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import clock_of, interleaved
from polyattn.structures.spans import segments_of


def main() -> int:
    """Measure the call and each segment in the same rounds."""
    asked = arguments(__doc__)
    record = Record("spans beside the sum of their segments' FA3 times", asked.small)
    work = workload_of("spans", asked.device, asked.dtype, small=asked.small)
    q, k, v = work.q, work.k, work.v
    segments = segments_of(work.structure.full[0], None, q.shape[1], k.shape[1])
    with torch.inference_mode():
        mine = ours(q, k, v, work.structure)
        makers = {
            f"fa3, queries {start}:{end} on {kv_end} keys{', causal' if causal else ''}": (
                lambda start=start, end=end, kv_end=kv_end, causal=causal: fa3(
                    q[:, start:end], k[:, :kv_end], v[:, :kv_end], is_causal=causal
                )
            )
            for start, end, kv_end, causal in segments
        }
        peers = offered(record, makers)
        timings = interleaved({"polyattn": mine, **peers}, clock_of(asked.device), seconds=asked.seconds, rounds=9)
        record.compare(SHAPES["spans"].title, timings, "polyattn", route=route(mine))
    sums = [sum(timings.rounds[peer][number] for peer in peers) for number in range(len(timings.rounds["polyattn"]))]
    complete = len(peers) == len(segments)
    ratios = [ms / sums[number] for number, ms in enumerate(timings.rounds["polyattn"])] if complete else []
    record.target("polyattn / sum of FA3's segments", statistics.median(ratios) if ratios else None, at_most=1.1)
    return record.end(__file__, asked.out)


if __name__ == "__main__":
    sys.exit(main())
