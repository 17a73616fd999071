"""What does padding cost: a prefix kept, and holes, beside FA3 varlen on rows already packed and SDPA with the mask?

python benchmarks/cuda/key_padding.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from _ours import ours, route
from _peers import fa3_varlen, offered, sdpa
from _record import Asked, Record, arguments

import polyattn as pa
from polyattn.bench.shapes import workload_of
from polyattn.bench.timing import Clock, clock_of, interleaved

#: Shape -> limits over FA3 varlen: a prefix, holes.
LIMITS = {"padded": (1.05, 1.16), "padded64": (1.05, 1.13)}


def main() -> int:
    """Measure both shapes, with a prefix and with holes."""
    asked = arguments(__doc__)
    record = Record("key padding beside FA3 varlen on packed rows and SDPA with a mask", asked.small)
    clock = clock_of(asked.device)
    with torch.inference_mode():
        for name in LIMITS:
            measure(name, asked, record, clock)
    return record.end(__file__, asked.out)


def measure(name: str, asked: Asked, record: Record, clock: Clock) -> None:
    """One shape."""
    work = workload_of(name, asked.device, asked.dtype, small=asked.small)
    q, k, v = work.q, work.k, work.v
    batch, width = q.shape[:2]
    prefix = work.structure
    lengths = prefix.host.lengths
    holes = pa.KeyPadding.from_mask(with_holes(lengths, width))
    keep = prefix.keep.to(asked.device)
    rows = [tensor.flatten(0, 1)[keep.flatten()] for tensor in (q, k, v)]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=asked.device)
    mask = keep[:, None, None, :]
    peers = offered(
        record,
        {
            "fa3 varlen, packed": lambda: fa3_varlen(*rows, cu, width),
            "sdpa with mask": lambda: sdpa(q, k, v, mask=mask),
        },
    )
    mine = {"polyattn prefix": ours(q, k, v, prefix), "polyattn holes": ours(q, k, v, holes)}
    timings = interleaved({**mine, **peers}, clock, seconds=asked.seconds, rounds=9)
    base = "fa3 varlen, packed" if "fa3 varlen, packed" in peers else "polyattn prefix"
    memory = extra_memory(mine["polyattn prefix"], q, asked.device)
    record.compare(
        f"{name}: {batch} x {width}, kept {', '.join(map(str, lengths))}",
        timings,
        base,
        routes={one: route(call) for one, call in mine.items()},
        prefix_extra_over_q=memory,
    )
    packed, masked = (peer if peer in peers else None for peer in ("fa3 varlen, packed", "sdpa with mask"))
    for one, limit in zip(mine, LIMITS[name], strict=True):
        record.target(f"{name}: {one} / fa3 varlen", packed and timings.ratio(one, packed), at_most=limit)
    ahead = masked and timings.ratio(masked, "polyattn prefix")
    record.target(f"{name}: sdpa with mask / polyattn prefix", ahead, at_least=1.6)
    record.target(f"{name}: prefix, memory beyond output and LSE over q's", memory, at_most=0.1)


def with_holes(lengths: tuple[int, ...], width: int) -> torch.Tensor:
    """[B,S] bool with as many keys kept, the padding in the middle."""
    mask = torch.ones(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, width // 2 : width // 2 + width - length] = False
    return mask


def extra_memory(call: Callable[[], Any], q: torch.Tensor, device: torch.device) -> float | None:
    """What a call needs at its peak beyond its output and an LSE, in sizes of q; a hidden copy would be 1 or more."""
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    call()
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    call()
    module.synchronize()
    used: int = module.max_memory_allocated() - before
    size = q.numel() * q.element_size()
    lse = q.shape[0] * q.shape[1] * q.shape[2] * 4
    return float(f"{max(0, used - size - lse) / size:.4g}")


if __name__ == "__main__":
    sys.exit(main())
