"""Forward and backward together: FA3's forward with cuDNN's backward, beside cuDNN's and torch's flash attention.

python benchmarks/cuda/training.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from _ours import ours, route
from _peers import offered, sdpa
from _record import Record, arguments
from torch.nn.attention import SDPBackend

from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import clock_of, interleaved


def main() -> int:
    """Measure FLUX's shape."""
    asked = arguments(__doc__)
    record = Record("forward and backward beside torch's", asked.small)
    work = workload_of("flux", asked.device, asked.dtype, small=asked.small)
    inputs = [tensor.requires_grad_() for tensor in (work.q, work.k, work.v)]
    upstream = torch.randn_like(work.q)
    mine = ours(*inputs)
    peers = offered(
        record,
        {
            "cudnn": lambda: both(sdpa(*inputs, SDPBackend.CUDNN_ATTENTION), inputs, upstream.transpose(1, 2)),
            "torch flash": lambda: both(sdpa(*inputs, SDPBackend.FLASH_ATTENTION), inputs, upstream.transpose(1, 2)),
        },
    )
    calls = {"polyattn": both(mine, inputs, upstream), **peers}
    timings = interleaved(calls, clock_of(asked.device), seconds=asked.seconds, rounds=9)
    record.compare(SHAPES["flux"].title, timings, "polyattn", route=route(mine))
    return record.end(__file__, asked.out)


def both(forward: Callable[[], Any], inputs: list[torch.Tensor], upstream: torch.Tensor) -> Callable[[], Any]:
    """A call and its gradients."""
    return lambda: torch.autograd.grad(forward(), inputs, upstream)


if __name__ == "__main__":
    sys.exit(main())
