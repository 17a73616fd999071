"""Video sparse attention of Wan's grids beside dense FA3 and fastvideo_kernel: time, what choosing tiles takes, memory.

Ours is counted from raster q, k, v and gate to raster output; theirs without bringing rows into tiles and back.

python benchmarks/cuda/video.py [--out DIR] [--small]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from _ours import ours, route
from _peers import fa3, offered
from _record import Asked, Record, arguments
from _video_peers import fastvideo
from _video_peers import route as route_of_fastvideo
from _video_work import GRIDS, TILES, Work, peak_bytes, work_of

from polyattn.bench.timing import Clock, clock_of, interleaved

#: Rows of a tile, share kept -> milliseconds at most on an H200, by grid.
LIMITS = {(256, 0.1): {"720p": 29.0, "480p": 5.6}}
#: Rows of a tile, share kept -> at most so many times a peer.
RATIOS = {(256, 0.5): ("fa3 dense", 0.8), (64, 0.1): ("fastvideo", 1.0)}
SHARES = (0.1, 0.5)
#: Shares of the plot of time against what is kept.
PLOTTED = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
#: What choosing tiles may take of the time, and the memory beside the output of q, k and v.
CHOOSING, MEMORY = 0.08, 0.08


def main() -> int:
    """Both grids, both tiles, both shares; then the curve."""
    asked = arguments(__doc__)
    record = Record("video sparse attention beside dense FA3 and fastvideo_kernel", asked.small)
    clock = clock_of(asked.device)
    with torch.inference_mode():
        for grid in GRIDS:
            for volume in TILES:
                for share in SHARES:
                    compare(grid, volume, share, asked, record, clock)
        for volume in TILES:
            curve(volume, asked, record, clock)
    return record.end(__file__, asked.out)


def compare(grid: str, volume: int, share: float, asked: Asked, record: Record, clock: Clock) -> None:
    """One shape in the same rounds, and the parts of ours."""
    work = work_of(grid, volume, share, asked.device, asked.dtype, small=asked.small)
    name = f"{grid}, tiles of {volume}, {share:.0%} kept"
    mine = ours(work.q, work.k, work.v, work.structure, gate=work.gate)
    calls: dict[str, Callable[[], Any]] = {"polyattn": mine, **_choosing(work)}
    peers = offered(
        record,
        {
            "fa3 dense": lambda: fa3(work.q, work.k, work.v),
            "fastvideo": lambda: fastvideo(work, work.structure.kept),
        },
    )
    timings = interleaved({**calls, **peers}, clock, seconds=asked.seconds, rounds=5)
    extra = peak_bytes(mine, asked.device)
    share_of_memory = None if extra is None else extra / work.bytes
    base = "fa3 dense" if "fa3 dense" in peers else "polyattn"
    record.compare(
        name, timings, base, route=route(mine), fastvideo=route_of_fastvideo(), tiles_kept=work.structure.kept,
        tiles=work.structure.num_tiles, extra_memory=share_of_memory,
    )  # fmt: skip
    limit = LIMITS.get((volume, share), {}).get(grid)
    if limit is not None:
        record.target(f"{name}, ms", timings.median("polyattn"), at_most=limit)
    peer, most = RATIOS.get((volume, share), ("", 0.0))
    if peer:
        record.target(f"{name} / {peer}", timings.ratio("polyattn", peer) if peer in peers else None, at_most=most)
    if share == SHARES[0]:
        choosing = timings.ratio("choosing alone", "polyattn") if "choosing alone" in calls else None
        record.target(f"{name}: choosing tiles, of the whole", choosing, at_most=CHOOSING)
        if grid == "720p":
            record.target(f"{name}: extra memory, of q, k and v", share_of_memory, at_most=MEMORY)


def curve(volume: int, asked: Asked, record: Record, clock: Clock) -> None:
    """Time against what is kept; the limit is dense FA3's time times it."""
    work = work_of("720p", volume, PLOTTED[0], asked.device, asked.dtype, small=asked.small)
    shares = {f"{share:.0%} kept": work.keeping(share) for share in PLOTTED}
    calls = {name: ours(some.q, some.k, some.v, some.structure) for name, some in shares.items()}
    peers = offered(record, {"fa3 dense": lambda: fa3(work.q, work.k, work.v)})
    timings = interleaved({**calls, **peers}, clock, seconds=2 * asked.seconds, rounds=3)
    points = []
    for share, name in zip(PLOTTED, shares, strict=True):
        exact = shares[name].structure.kept / shares[name].structure.num_tiles
        dense = timings.median("fa3 dense") if peers else None
        points.append([share, exact, timings.median(name), None if dense is None else dense * exact])
    base = "fa3 dense" if peers else f"{PLOTTED[-1]:.0%} kept"
    record.compare(f"720p, tiles of {volume}: time against what is kept", timings, base, plot=points)


def _choosing(work: Work) -> dict[str, Callable[[], Any]]:
    """Choosing tiles alone, where the kernels run."""
    if work.q.device.type == "cpu":
        return {}
    from polyattn.kernels.video_attention import most_heads
    from polyattn.kernels.video_select import select

    tiling = work.tiling()
    size = most_heads(work.q, work.k, work.v, tiling.used)

    def run() -> None:
        for first in range(0, work.k.shape[2], size):
            q, k = (x[:, :, first : first + size] for x in (work.q, work.k))
            select(q, k, None, tiling.order, tiling.starts, prefix=tiling.prefix, kept=tiling.kept, scale=0.1)

    return {"choosing alone": run}


if __name__ == "__main__":
    sys.exit(main())
