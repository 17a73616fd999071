"""Which tile is fastest for video attention here? Every candidate compiled ahead in processes of its own, then timed.

The winners are what `polyattn/kernels/video_tiles.py` should name for this architecture.

python benchmarks/cuda/video_tiles.py [--out DIR] [--small]      (TRITON_INTERPRET=1 to see it run without a GPU)
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import torch
from _record import Asked, Record, arguments
from _video_work import TILES, Work, structure_of, work_of

from polyattn.bench.timing import Clock, clock_of, interleaved
from polyattn.kernels.video_attention import most_heads, video_attention
from polyattn.kernels.video_tiles import VideoTile

#: How rows are loaded: packed or not, and what descriptors load.
_LOADS = ((False, ""), (True, ""), (True, "k"), (True, "kv"))
#: Bytes of shared memory that a program may have; more is left out before it is compiled.
_SHARED = 227 * 1024
#: Timed in rounds with the best of them, those after the first look.
_FINALISTS = 6
_KEPT = 0.1
#: What is seen without a GPU.
SMALL = (64,)


def candidates(volume: int, *, small: bool) -> list[VideoTile]:
    """Tiles whose buffers fit; a warp group takes 64 rows."""
    if small:
        return [VideoTile(16, 16, 4, 2), VideoTile(16, 16, 4, 2, packed=True, paired=True)]
    found = []
    for (rows, warps), keys, stages, (packed, described), paired in product(
        ((64, 4), (128, 8)), (32, 64, 128), (2, 3, 4), _LOADS, (False, True)
    ):
        block = rows * (2 if paired else 1)
        shared = 256 * (block + 2 * stages * keys) + 1100
        if block <= max(volume, 64) and keys <= volume and shared <= _SHARED:
            found.append(VideoTile(rows, keys, warps, stages, packed, described, paired))
    return found


def main() -> int:
    """Tiles of 64 and of 256 tokens."""
    asked = arguments(__doc__)
    record = Record("tiles of video attention", asked.small)
    clock = clock_of(asked.device)
    with torch.inference_mode():
        for volume in SMALL if asked.small else TILES:
            work = short(volume, asked) if asked.small else work_of("720p", volume, _KEPT, asked.device, asked.dtype)
            sweep(volume, work, asked, record, clock)
    return record.end(__file__, asked.out)


def short(volume: int, asked: Asked) -> Work:
    """A video that the interpreter is done with soon."""
    tensors = (torch.randn(1, 2 * 5 * 5, 1, 16, device=asked.device, dtype=asked.dtype) for _ in range(4))
    return Work(*tensors, structure_of((2, 5, 5), TILES[volume], 0.5))


def sweep(volume: int, work: Work, asked: Asked, record: Record, clock: Clock) -> None:
    """Each once, the fastest few in rounds, then how many heads at once."""
    tiles = candidates(volume, small=asked.small)
    refused = compiled_ahead(volume, tiles, asked)
    record.missing.update({f"{volume}: {word(tile)}": why for tile, why in refused.items()})
    calls = {word(tile): called(work, tile) for tile in tiles if tile not in refused}
    want = next(iter(calls.values()))().float()
    most = 0.05 * want.abs().max().item()
    first: dict[str, float] = {}
    for name, call in calls.items():
        error = (call().float() - want).abs().max().item()
        if not error < most:
            record.missing[f"{volume}: {name}"] = f"wrong by {error}"
            continue
        first[name] = min(clock.samples(call, 2, 1, 0.0))
    order = sorted(first, key=first.__getitem__)
    best = order[:_FINALISTS]
    timings = interleaved({name: calls[name] for name in best}, clock, seconds=asked.seconds)
    record.compare(f"tiles of {volume}", timings, best[0], first_look=[[name, first[name]] for name in order])
    winner = next(tile for tile in tiles if word(tile) == timings.fastest())
    usual = most_heads(work.q, work.k, work.v, work.tiling().used)
    sizes = sorted({1, 2, usual, 2 * usual, work.k.shape[2]})
    by_heads = {f"{size} heads at once": called(work, winner, size) for size in sizes if size <= work.k.shape[2]}
    timings = interleaved(by_heads, clock, seconds=asked.seconds)
    name = f"{usual} heads at once"
    record.compare(f"tiles of {volume}, {word(winner)}: heads", timings, name, usual=usual)


def called(work: Work, tile: VideoTile, heads: int | None = None) -> Callable[[], Any]:
    """Our call with that tile, without a gate."""
    tiling, scale = work.tiling(), work.q.shape[3] ** -0.5
    return lambda: video_attention(work.q, work.k, work.v, None, tiling, scale=scale, tile=tile, heads_at_once=heads)[0]


def word(tile: VideoTile) -> str:
    """Its name in the record."""
    load = "gathered" if not tile.packed else f"packed, {tile.described or 'no'} descriptors"
    pair = ", paired" if tile.paired else ""
    return f"{tile.block_m}x{tile.block_n}, {tile.warps} warps, {tile.stages} stages, {load}{pair}"


def compiled_ahead(volume: int, tiles: list[VideoTile], asked: Asked) -> dict[VideoTile, str]:
    """Fill Triton's cache by many processes, with a short video of the same kind -> the tiles that cannot run, why."""
    if asked.device.type == "cpu":
        return {}
    workers = max(1, min(len(tiles), (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        told = pool.map(_tried, [(volume, tile, str(asked.device)) for tile in tiles])
        return {tile: why for tile, why in zip(tiles, told, strict=True) if why}


def _tried(job: tuple[int, VideoTile, str]) -> str:
    """Why one tile does not run, if it does not."""
    volume, tile, device = job
    shape = (1, 5 * 9 * 9, 40, 128)  # strides and switches are those of the long video
    try:
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
        call = called(Work(q, k, v, q, structure_of((5, 9, 9), TILES[volume], 0.3)), tile)
        call()
        torch.get_device_module(q.device).synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
