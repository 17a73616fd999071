"""What do graphs save on a transformer of 20 blocks: one graph, or graphs split at every attention call?

python benchmarks/cuda/graphs.py [--out DIR] [--small]

Beside eager and torch.compile, with tiny blocks (the host is slower than the device) and large ones (it is not). Times
are those of the caller, from an idle device to an answer that is there: what graphs save is the host's part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _record import Asked, Record, arguments

import polyattn as pa
from polyattn.bench.timing import Call, Clock, HostClock, interleaved
from polyattn.graphs import BreakableGraph

BLOCKS = 20
#: Name -> samples, rows, heads, head_dim.
SIZES = {"tiny": (1, 128, 8, 64), "large": (1, 4608, 24, 128)}
SMALL = {"tiny": (1, 16, 2, 16)}


class Block(torch.nn.Module):
    """A transformer's block, without what does not matter here."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.norm_1, self.norm_2 = heads, torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.attend = pa.Attention(heads, head_dim)

    def forward(self, x: torch.Tensor, structure: Any) -> torch.Tensor:
        """x [B,S,width] -> [B,S,width]."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.out(self.attend(q, k, v, structure).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Model(torch.nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, structure: Any = None) -> torch.Tensor:
        """x [B,S,width] -> [B,S,width]."""
        for block in self.blocks:
            x = block(x, structure)
        return x


class CallersClock:
    """Wall time until the device is done: the host's part is the question here, and nothing is queued ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)

    def samples(self, call: Call, count: int, inner: int, lead_ms: float) -> list[float]:
        """`count` samples in milliseconds a call, each over `inner` calls in a row and the wait for the last."""
        taken = []
        for _ in range(count):
            self._module.synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            self._module.synchronize()
            taken.append((time.perf_counter() - start) * 1e3 / inner)
        return taken

    def host_ms(self, call: Call) -> float:
        """No lead."""
        return 0.0


def main() -> int:
    """Both sizes, dense and with a padding that each call brings."""
    asked = arguments(__doc__)
    record = Record("graphs of a transformer of 20 blocks", asked.small)
    with torch.no_grad():
        for name, size in (SMALL if asked.small else SIZES).items():
            compare(name, size, asked, record)
    return record.end(__file__, asked.out)


def compare(name: str, size: tuple[int, int, int, int], asked: Asked, record: Record) -> None:
    """Every way in the same rounds."""
    samples, rows, heads, head_dim = size
    model = Model(Block(heads, head_dim) for _ in range(BLOCKS)).to(asked.device, asked.dtype)
    compiled = torch.compile(model, dynamic=False)
    blocks_compiled = Model(torch.compile(block, dynamic=False) for block in model.blocks)
    x = torch.randn(samples, rows, heads * head_dim, device=asked.device, dtype=asked.dtype)
    padding = pa.KeyPadding.from_lengths([rows - rows // 8] * samples, rows)
    ways: dict[str, tuple[Callable[..., Any], Any]] = {
        "eager": (model, None), "eager, padding": (model, padding), "torch.compile": (compiled, None),
    }  # fmt: skip
    if asked.device.type != "cpu":
        ways |= {
            "one graph": (BreakableGraph(model), None),
            "split at attention": (BreakableGraph(model, eager=lambda stated: True), None),
            "split, padding": (BreakableGraph(model), padding),
            "one graph of compiled blocks": (BreakableGraph(blocks_compiled), None),
        }
    calls = {way: _call(run, x, structure) for way, (run, structure) in ways.items()}
    wants = {padded: calls["eager, padding" if padded else "eager"]().float() for padded in (False, True)}
    for way, call in calls.items():
        want = wants["padding" in way]
        error = ((call().float() - want).norm() / want.norm()).item()
        if not error < 0.02:
            record.missing[f"{name}: {way}"] = f"wrong by {error}"
    clock: Clock = HostClock() if asked.device.type == "cpu" else CallersClock(asked.device)
    timings = interleaved(calls, clock, seconds=asked.seconds)
    record.compare(f"{name}: {samples}x{rows}, {heads} heads of {head_dim}", timings, "eager")


def _call(run: Callable[..., Any], x: torch.Tensor, structure: Any) -> Callable[[], Any]:
    return lambda: run(x, structure)


if __name__ == "__main__":
    sys.exit(main())
