"""Do pack and unpack move rows at the speed of a copy?

python benchmarks/cuda/row_movement.py [--out DIR] [--small]

Every byte counts once: what is read, and what is written, zeros included.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _record import Asked, Record, arguments

from polyattn import vendor
from polyattn.bench.timing import Clock, clock_of, interleaved


def main() -> int:
    """A large batch, more than 300 MB a tensor, and a small one."""
    asked = arguments(__doc__)
    record = Record("pack and unpack beside copy_ of as many bytes", asked.small)
    clock = clock_of(asked.device)
    rows = row_operations(asked.device, record)
    shapes = ((2, 256, 4, 64), (2, 64, 4, 64)) if asked.small else ((2, 20480, 40, 128), (2, 1280, 24, 128))
    with torch.inference_mode():
        for name, shape, limit in zip(("large", "small"), shapes, (1 / 0.85, 1.3), strict=True):
            measure(name, shape, limit, asked, record, clock, rows)
    return record.end(__file__, asked.out)


def row_operations(device: torch.device, record: Record) -> Any:
    """The Triton ones on an accelerator, else torch's."""
    if device.type != "cpu":
        try:
            return vendor.TRITON_ROWS
        except (AttributeError, ImportError) as error:
            record.missing["TRITON_ROWS"] = f"{type(error).__name__}: {error}"
    return vendor.TORCH_ROWS


def measure(
    name: str, shape: tuple[int, ...], limit: float, asked: Asked, record: Record, clock: Clock, rows: Any
) -> None:
    """Pack q, k, v, unpack one output, at one shape of which nine tenths are kept, with holes."""
    batch, length = shape[:2]
    q, k, v = (torch.randn(shape, device=asked.device, dtype=asked.dtype) for _ in range(3))
    kept = [row * length + at for row in range(batch) for at in range(length) if at % 20 not in (7, 8)]
    index = torch.tensor(kept, device=asked.device)
    packed = q.flatten(0, 1)[index]
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    row_bytes = q[0, 0].numel() * q.element_size()
    pack_bytes, unpack_bytes = 2 * 3 * len(kept) * row_bytes, (len(kept) + batch * length) * row_bytes
    out = torch.empty_like(q)

    def index_copy() -> torch.Tensor:
        return torch.zeros_like(flat[0]).index_copy_(0, index, packed)

    calls = {
        "pack": lambda: rows.pack((q, k, v), index),
        "copy of pack's bytes": copy_of(pack_bytes // 2, asked.device),
        "index_select": lambda: [tensor.index_select(0, index) for tensor in flat],
        "unpack": lambda: rows.unpack(packed, None, index, None, batch, length),
        "unpack into out": lambda: rows.unpack(packed, None, index, out, batch, length),
        "copy of unpack's bytes": copy_of(unpack_bytes // 2, asked.device),
        "zeros, index_copy": index_copy,
    }
    timings = interleaved(calls, clock, seconds=asked.seconds, rounds=9)
    moved = {"pack": pack_bytes, "index_select": pack_bytes, "copy of pack's bytes": pack_bytes}
    tbps = {one: float(f"{moved.get(one, unpack_bytes) / timings.median(one) / 1e9:.4g}") for one in calls}
    record.compare(f"{name}: {list(shape)}, {len(kept)} rows kept", timings, "copy of pack's bytes", tbps=tbps)
    for one, copy in (("pack", "copy of pack's bytes"), ("unpack", "copy of unpack's bytes")):
        record.target(f"{name}: {one} / copy", timings.ratio(one, copy), at_most=round(limit, 4))


def copy_of(size: int, device: torch.device) -> Any:
    """A copy_ of so many bytes."""
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


if __name__ == "__main__":
    sys.exit(main())
