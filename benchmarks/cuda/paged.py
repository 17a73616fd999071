"""Paged attention beside FA3 on a contiguous cache, at pages of 16 to 256; and writing into the cache beside a copy.

python benchmarks/cuda/paged.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from _ours import ours, route
from _peers import fa3, offered
from _record import Asked, Record, arguments

import polyattn as pa
from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import Clock, clock_of, interleaved

#: Page size -> limit over FA3 on a contiguous cache.
LIMITS = {16: 1.6, 64: 1.3, 128: 1.3, 256: 1.3}
KV_HEADS, HEAD_DIM = 8, 128


def main() -> int:
    """Attention at each page size, then writes."""
    asked = arguments(__doc__)
    record = Record("paged attention beside FA3 on a contiguous cache; cache writes beside copy_", asked.small)
    clock = clock_of(asked.device)
    with torch.inference_mode():
        attention(asked, record, clock)
        writes(asked, record, clock)
    return record.end(__file__, asked.out)


def attention(asked: Asked, record: Record, clock: Clock) -> None:
    """All page sizes and the contiguous cache in the same rounds."""
    works = {page: workload_of(f"paged{page}", asked.device, asked.dtype, small=asked.small) for page in LIMITS}
    work = works[max(works)]
    requests = work.q.shape[0]
    k, v = (pool.reshape(requests, -1, *pool.shape[2:]) for pool in (work.k, work.v))
    mine = {f"page {page}": ours(work.q, work.k, work.v, work.structure) for page, work in works.items()}
    peers = offered(
        record,
        {
            "fa3 contiguous": lambda: fa3(work.q, k, v, num_splits=0),
            "fa3 contiguous, one split": lambda: fa3(work.q, k, v, num_splits=1),
        },
    )
    timings = interleaved({**mine, **peers}, clock, seconds=2 * asked.seconds, rounds=9)
    base = "fa3 contiguous" if "fa3 contiguous" in peers else "page 256"
    routes = {name: route(call) for name, call in mine.items()}
    record.compare(SHAPES["paged64"].title.replace("pages of 64", "pages"), timings, base, routes=routes)
    for page, limit in LIMITS.items():
        value = timings.ratio(f"page {page}", base) if base in peers else None
        record.target(f"page {page} / fa3 contiguous", value, at_most=limit)


def writes(asked: Asked, record: Record, clock: Clock) -> None:
    """Rows at scattered slots; 4 KiB of k and v a row."""
    for name, rows in (("few", 512), ("many", 2048 if asked.small else 65536)):
        write, copy, size = write_and_copy(rows, asked)
        calls = {"write": replayed(write, asked.device), "copy": replayed(copy, asked.device)}
        timings = interleaved(calls, clock, seconds=asked.seconds, rounds=9)
        record.compare(f"writing {rows} rows, {size / 2**20:.0f} MiB", timings, "copy")
        if name == "few":
            record.target("writing 512 rows, us", timings.median("write") * 1e3, at_most=5.0)
        else:
            record.target("writing many rows: copy's time / write's", timings.ratio("copy", "write"), at_least=0.8)


def replayed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call as a device graph, so that a few microseconds are the device's and not the host's; itself elsewhere."""
    if device.type == "cpu":
        return call
    module = torch.get_device_module(device)
    call()
    module.synchronize()
    graph = module.CUDAGraph()
    with module.graph(graph):
        call()
    return graph.replay


def write_and_copy(rows: int, asked: Asked) -> tuple[Any, Any, int]:
    """A write of so many rows, a copy_ of as many bytes, and the bytes."""
    cache = pa.PagedKVCache(rows // 16 + 8, 16, KV_HEADS, HEAD_DIM, asked.dtype, asked.device)
    k, v = (torch.randn(rows, KV_HEADS, HEAD_DIM, device=asked.device, dtype=asked.dtype) for _ in range(2))
    slots = torch.randperm(cache.num_pages * 16)[:rows].to(asked.device)
    size = 2 * k.numel() * k.element_size()
    source, target = (torch.zeros(size, dtype=torch.int8, device=asked.device) for _ in range(2))
    return lambda: cache.write(k, v, slots), lambda: target.copy_(source), size


if __name__ == "__main__":
    sys.exit(main())
