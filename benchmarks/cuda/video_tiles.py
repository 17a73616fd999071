"""Which tile is fastest for video attention here? Every candidate compiled ahead in processes of its own, then timed.

The winners are what `polyattn/kernels/video_tiles.py` should name for this architecture.

python benchmarks/cuda/video_tiles.py [--out DIR] [--small]      (TRITON_INTERPRET=1 to see it run without a GPU)
python benchmarks/cuda/video_tiles.py --hopper                   the Hopper kernels beside a few others

The Hopper kernels could hang: each first runs in a process of its own, which ends if it takes too long.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from typing import Any

import torch
from _record import Asked, Record, arguments
from _video_work import TILES, Work, structure_of, work_of

import polyattn as pa
from polyattn.bench.timing import Clock, clock_of, interleaved
from polyattn.kernels.launch import architecture_of
from polyattn.kernels.video_attention import most_heads, video_attention
from polyattn.kernels.video_select import select
from polyattn.kernels.video_tiles import HopperTile, VideoTile, video_tile

#: How rows are loaded: packed or not, and what descriptors load.
_LOADS = ((False, ""), (True, ""), (True, "k"), (True, "kv"))
#: Bytes of shared memory that a program may have; more is left out before it is compiled.
_SHARED = 227 * 1024
#: Timed in rounds with the best of them, those after the first look.
_FINALISTS = 6
_KEPT = 0.1
#: What is seen without a GPU.
SMALL = (64,)
#: Words of the command line: the Hopper kernels alone, and one of them in this process.
_HOPPER, _TRY = "--hopper", "--try"
#: What a Hopper kernel may take for its first calls, in seconds, compiling and starting Python included.
_PATIENCE = 90
#: Groups, box, keys and stages of each that is tried, by the rows of a video's tile.
_HOPPER_FIELDS: dict[int, tuple[tuple[int, ...], ...]] = {
    256: ((2, 64, 128, 2), (2, 32, 128, 2), (2, 32, 128, 3), (2, 64, 128, 3), (2, 128, 128, 3), (2, 32, 64, 4)),
    64: ((1, 64, 64, 2), (1, 32, 64, 2), (1, 32, 64, 3), (1, 64, 64, 3), (1, 32, 128, 2)),
}


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
    if sys.argv[1:2] == [_TRY]:
        return tried(json.loads(sys.argv[2]))
    hopper = _HOPPER in sys.argv
    if hopper:
        sys.argv.remove(_HOPPER)
    asked = arguments(__doc__)
    record = Record("tiles of video attention", asked.small)
    clock = clock_of(asked.device)
    with torch.inference_mode():
        for volume in SMALL if asked.small else TILES:
            work = short(volume, asked) if asked.small else work_of("720p", volume, _KEPT, asked.device, asked.dtype)
            tiles = candidates(volume, small=asked.small)
            if hopper:
                usual = video_tile(architecture_of(asked.device), 128, 128, 2, volume, volume)
                tiles = [usual] + [tile for tile in tiles if tile.stages == 3 and tile.described == "kv"]
            tiles += hopper_candidates(volume, asked, record)
            winner = sweep(volume, tiles, work, asked, record, clock)
            if hopper:
                print(f"{kept_flops(work) / 1e12:.3f} TFLOP are kept")
                for tile in {tiles[0]: None, winner: None}:
                    print(f"{word(tile)}: {kernels_of(called(work, tile))}")
    return record.end(__file__, asked.out)


def short(volume: int, asked: Asked) -> Work:
    """A video that the interpreter is done with soon."""
    tensors = (torch.randn(1, 2 * 5 * 5, 1, 16, device=asked.device, dtype=asked.dtype) for _ in range(4))
    return Work(*tensors, structure_of((2, 5, 5), TILES[volume], 0.5))


def hopper_candidates(volume: int, asked: Asked, record: Record) -> list[Any]:
    """Those of the Hopper kernels that are right and come to an end, each seen in a process of its own."""
    if asked.device.type == "cpu" or architecture_of(asked.device) != "sm_90":
        return []
    command = [sys.executable, __file__, _TRY]
    found = []

    def told(fields: tuple[int, ...]) -> str:
        try:
            ran = subprocess.run(
                [*command, json.dumps(fields)], capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            return f"did not end in {_PATIENCE} s"
        print(f"{fields}: {ran.stdout.strip()}", flush=True)
        return "" if ran.returncode == 0 else (ran.stdout + ran.stderr).strip()[-300:]

    with ThreadPoolExecutor(6) as pool:
        for fields, why in zip(_HOPPER_FIELDS[volume], pool.map(told, _HOPPER_FIELDS[volume]), strict=True):
            tile = HopperTile(*fields)
            if why:
                record.missing[f"{volume}: {word(tile)}"] = why
            else:
                found.append(tile)
    return found


def tried(fields: list[int]) -> int:
    """One Hopper kernel beside the tested one: short videos with every kind of tile, then the long one; 1 if wrong."""
    device = torch.empty(0, device="cuda").device
    tile = HopperTile(*fields)
    volume = 64 if tile.groups == 1 else 256
    usual = video_tile(architecture_of(device), 128, 128, 2, volume, volume)
    worst = 0.0
    layouts = (
        (pa.VideoLayout((5, 9, 9)), 0.3), (pa.VideoLayout((4, 8, 16), prefix=(7, 300)), 0.5),
        (pa.VideoLayout((9, 17, 20), prefix=(64,)), 0.8), (pa.VideoLayout((1, 3, 5)), 0.5),
    )  # fmt: skip
    with torch.inference_mode():
        for dtype, (layout, share), samples, heads, kv_heads in product(
            (torch.bfloat16, torch.float16), layouts, (1, 2), (4,), (4, 2)
        ):
            tiles = pa.VideoTiles(layout, TILES[volume], sparsity=1.0 - share, keep_sparse_numerics=True)
            q, gate, k, v = (
                torch.randn(samples, layout.rows, some, 128, device=device, dtype=dtype)
                for some in (heads, heads, kv_heads, kv_heads)
            )
            tiling = Work(q, k, v, gate, tiles).tiling()

            def answer(
                tile: Any, q: Any = q, k: Any = k, v: Any = v, gate: Any = gate, tiling: Any = tiling
            ) -> tuple[Any, Any]:
                out = torch.full_like(q, float("nan"))
                return video_attention(q, k, v, out, tiling, scale=-0.1, gate=gate, need_lse=True, tile=tile)

            want, got = answer(usual), answer(tile)
            for one, other in zip(want, got, strict=True):
                worst = max(worst, (one.float() - other.float()).nan_to_num(9e9).abs().max().item())
            again = answer(tile)
            if not all(torch.equal(one, other) for one, other in zip(got, again, strict=True)):
                print("other bits when it runs again")
                return 1
            if not worst < 0.05:
                print(f"wrong by {worst}: {layout}, {dtype}, {samples} samples, {kv_heads} KV heads")
                return 1
        long = work_of("720p", volume, _KEPT, device, torch.bfloat16)
        want, got = called(long, usual)().float(), called(long, tile)()
        far = (want - got.float()).nan_to_num(9e9).abs().max().item() / want.abs().max().item()
        milliseconds = min(clock_of(device).samples(called(long, tile), 3, 1, 0.0))
        same = torch.equal(got, called(long, tile)())
    print(f"short ones off by {worst:.3g}, the long one by {far:.3g} of its largest, {milliseconds:.2f} ms, {same = }")
    return 0 if far < 0.05 and same else 1


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of one call, all launches of it together."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = {one.key[:40]: round(one.self_device_time_total / 1e3, 3) for one in profile.key_averages()}
    return {name: took for name, took in sorted(found.items(), key=lambda one: -one[1]) if took > 0.02}


def kept_flops(work: Work) -> int:
    """Of the fine branch: 4 * 128 for each pair of a query and a kept key."""
    tiling = work.tiling()
    chosen = select(
        work.q, work.k, None, tiling.order, tiling.starts, prefix=tiling.prefix, kept=tiling.kept,
        scale=work.q.shape[3] ** -0.5,
    )  # fmt: skip
    sizes = tiling.starts.diff().long()
    keys = sizes[chosen.lists.long()].sum(-1)
    return int((keys * sizes).sum()) * 4 * work.q.shape[3]


def sweep(volume: int, tiles: list[Any], work: Work, asked: Asked, record: Record, clock: Clock) -> Any:
    """Each once, the fastest few in rounds, then how many heads at once -> the fastest."""
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
    return winner


def called(work: Work, tile: Any, heads: int | None = None) -> Callable[[], Any]:
    """Our call with that tile, without a gate."""
    tiling, scale = work.tiling(), work.q.shape[3] ** -0.5
    return lambda: video_attention(work.q, work.k, work.v, None, tiling, scale=scale, tile=tile, heads_at_once=heads)[0]


def word(tile: Any) -> str:
    """Its name in the record."""
    if not isinstance(tile, VideoTile):
        return "hopper " + ", ".join(f"{name} {value}" for name, value in tile._asdict().items())
    load = "gathered" if not tile.packed else f"packed, {tile.described or 'no'} descriptors"
    pair = ", paired" if tile.paired else ""
    return f"{tile.block_m}x{tile.block_n}, {tile.warps} warps, {tile.stages} stages, {load}{pair}"


def compiled_ahead(volume: int, tiles: list[Any], asked: Asked) -> dict[Any, str]:
    """Fill Triton's cache by many processes, with a short video of the same kind -> the tiles that cannot run, why."""
    if asked.device.type == "cpu":
        return {}
    workers = max(1, min(len(tiles), (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        told = pool.map(_tried, [(volume, tile, str(asked.device)) for tile in tiles])
        return {tile: why for tile, why in zip(tiles, told, strict=True) if why}


def _tried(job: tuple[int, Any, str]) -> str:
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
