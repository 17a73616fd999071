"""Ranks of a benchmark: started one a device, timed together, and of one mind about what is measured how often."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from polyattn.bench.timing import Call

#: What a section of scripts/gpu.py ends with that shall be run again: here, because devices are missing.
UNFINISHED = 3
#: Flushes more than any cache, as `polyattn.bench.timing` does.
_FLUSHED_BYTES = 256 * 2**20


def start_ranks(script: str, arguments: Sequence[str]) -> int:
    """Run the script once a device of this host (two processes on a processor); the worst exit code."""
    on_device = torch.accelerator.is_available()
    ranks = torch.accelerator.device_count() if on_device else 2
    if ranks < 2:
        print(f"not run: {ranks} device here, two or more are needed")
        return UNFINISHED
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    while all(process.poll() is None for process in processes):
        time.sleep(0.2)
    end = time.monotonic() + 60.0  # one that crashed leaves the others waiting for it
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.2)
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    return next((code for code in codes if code not in (0, 1)), max(codes))


def join_ranks() -> None:
    """This process's device and the default group: its backend for the device, gloo for what is on the host."""
    rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(None if torch.accelerator.is_available() else "gloo")


def everybody(good: bool) -> bool:
    """Whether it is good on every rank; by the host, so that it can be asked when a device's collective has failed."""
    told = torch.tensor([float(good)])
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


def greatest(values: Sequence[float]) -> list[float]:
    """The greatest of each over all ranks: a call is done when it is on the last of them."""
    told = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return list(told.tolist())


class RanksClock:
    """A `polyattn.bench.timing.Clock` for calls that all ranks make together.

    Ranks begin each sample at once, and every figure is the greatest over the ranks: whoever decides by these figures,
    as `interleaved` does, decides alike everywhere, so that nobody waits in a collective alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_device = device.type != "cpu"
        self._module: Any = torch.get_device_module(device) if on_device else None
        self._cache = torch.empty(_FLUSHED_BYTES if on_device else 0, dtype=torch.int8, device=device)
        self._meeting = torch.zeros(1, device=device)
        flushes = [self._elapsed(self._cache.zero_, 1) for _ in range(5)] if on_device else [1.0]
        (self._flush_ms,) = greatest([max(statistics.median(flushes), 1e-3)])

    def samples(self, call: Call, count: int, inner: int, lead_ms: float) -> list[float]:
        """Milliseconds a call, `count` times over `inner` calls in a row."""
        return greatest([self._sample(call, inner, lead_ms) for _ in range(count)])

    def host_ms(self, call: Call) -> float:
        """The least of three, each with an idle queue."""
        if self._module is None:
            return 0.0
        found = []
        for _ in range(3):
            self._module.synchronize()
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e3)
        self._module.synchronize()
        return min(greatest([min(found)])[0], 1.0)

    def _sample(self, call: Call, inner: int, lead_ms: float) -> float:
        if self._module is None:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            return (time.perf_counter() - start) * 1e3 / inner
        for _ in range(max(1, round(lead_ms / self._flush_ms + 0.5))):
            self._cache.zero_()
        dist.all_reduce(self._meeting)  # in the stream: the devices go on from here together
        return self._elapsed(call, inner)

    def _elapsed(self, call: Call, inner: int) -> float:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / inner


def beyond(call: Callable[[], torch.Tensor], device: torch.device) -> int | None:
    """Bytes that a call needs at its peak beside its answer, the most over the ranks; None where nobody counts them."""
    if device.type != "cuda":
        return None
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    answer = call()
    torch.cuda.synchronize()
    return round(greatest([torch.cuda.max_memory_allocated() - before - answer.nbytes])[0])


def waits(call: Callable[[], object], device: torch.device) -> str:
    """Whether a call waits for the device on the host: "no", or where."""
    if device.type != "cuda":
        return "not asked on this device"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        found = "no"
    except RuntimeError as error:
        found = str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found
