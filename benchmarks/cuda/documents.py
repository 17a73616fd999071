"""Packed documents of 20000 and 12760 tokens: polyattn beside FA3 varlen, torch's varlen_attn and compiled flex.

python benchmarks/cuda/documents.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys

import torch
from _ours import ours, route
from _peers import fa3_varlen, flex_documents, offered, torch_varlen
from _record import Record, arguments

from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import clock_of, interleaved


def main() -> int:
    """Measure."""
    asked = arguments(__doc__)
    record = Record("packed documents beside FA3 varlen, torch varlen and flex", asked.small)
    work = workload_of("documents", asked.device, asked.dtype, small=asked.small)
    q, k, v, packed = work.q, work.k, work.v, work.structure
    cu, longest, lengths = packed.cu_q.to(asked.device), packed.max_q, packed.lengths_q
    with torch.inference_mode():
        mine = ours(q, k, v, packed)
        peers = offered(
            record,
            {
                "fa3 varlen": lambda: fa3_varlen(q, k, v, cu, longest),
                "torch varlen": lambda: torch_varlen(q, k, v, cu, longest),
                "flex": lambda: flex_documents(q, k, v, lengths),
            },
        )
        timings = interleaved({"polyattn": mine, **peers}, clock_of(asked.device), seconds=asked.seconds, rounds=7)
        base = "fa3 varlen" if "fa3 varlen" in peers else "polyattn"
        record.compare(SHAPES["documents"].title, timings, base, route=route(mine))
    value = timings.ratio("polyattn", base) if base != "polyattn" else None
    record.target("polyattn / fa3 varlen", value, at_most=1.02)
    return record.end(__file__, asked.out)


if __name__ == "__main__":
    sys.exit(main())
