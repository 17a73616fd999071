"""fp8 at Wan 480p: how much faster than bf16, rotation and quantisation included, and at what error?

python benchmarks/cuda/fp8.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _ours import ours, route
from _peers import offered
from _record import Asked, Record, arguments

import polyattn as pa
from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import clock_of, interleaved


def main() -> int:
    """Speed, then errors."""
    asked = arguments(__doc__)
    record = Record("fp8 attention beside bf16: speed and error", asked.small)
    work = workload_of("wan480", asked.device, asked.dtype, small=asked.small)
    q, k, v = work.q, work.k, work.v
    plain, turned = pa.Quant("fp8", rotate=False), pa.Quant("fp8", rotate=True)
    with torch.inference_mode():
        makers = {
            "fp8, rotated": lambda: ours(q, k, v, quant=turned),
            "fp8": lambda: ours(q, k, v, quant=plain),
        }
        quantised = offered(record, makers)
        calls = {"unquantised": ours(q, k, v), **quantised}
        timings = interleaved(calls, clock_of(asked.device), seconds=2 * asked.seconds, rounds=7)
        routes = {name: route(call) for name, call in calls.items()}
        record.compare(SHAPES["wan480"].title, timings, "unquantised", routes=routes)
        if quantised:
            record.comparisons["relative error"] = errors(asked)
    rotated = "fp8, rotated" in quantised
    value = timings.ratio("unquantised", "fp8, rotated") if rotated else None
    record.target("unquantised / fp8, rotated", value, at_least=1.27)
    return record.end(__file__, asked.out)


def errors(asked: Asked) -> dict[str, Any]:
    """Frobenius error over the norm of the float32 answer, for smooth inputs and for some with large channels."""
    shape = (1, 256, 4, 64) if asked.small else (1, 4096, 8, 128)
    found = {}
    for name, factor in (("smooth", 1.0), ("outliers", 20.0)):
        q, k, v = (torch.randn(shape, device=asked.device) for _ in range(3))
        for tensor in (q, k):
            tensor[..., ::32] *= factor
        q, k = q / factor**0.5, k / factor**0.5
        low = [tensor.to(asked.dtype) for tensor in (q, k, v)]
        exact = pa.attention(*(tensor.float() for tensor in low), backend="blocked")
        for words, quant in (
            ("unquantised", None),
            ("fp8", pa.Quant("fp8", rotate=False)),
            ("fp8, rotated", pa.Quant("fp8")),
        ):
            error = (pa.attention(*low, quant=quant).float() - exact).norm() / exact.norm()
            found[f"{name}, {words}"] = float(f"{error.item():.4g}")
    return found


if __name__ == "__main__":
    sys.exit(main())
