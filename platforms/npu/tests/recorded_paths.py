"""Runs the reference's paths on the emulated device and tells what each asked of the vendor's op; JSON out.

    python -m platforms.npu.tests.recorded_paths '{"soc": "A2"}'

A device is named once a process, so that the paths of one machine share one. MindIE-SD is the real package.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.emulators.npu.stack import using


class Path(NamedTuple):
    """A path of the reference, or one of ours that it lacks; `soc` is the machine that it is told on."""

    title: str
    backend: str
    call: Callable[[str], None]
    soc: str = "A2"


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().npu()


def _attend(q: tuple[int, ...], k: tuple[int, ...], make: Any = None, **given: Any) -> Callable[[str], None]:
    def call(backend: str) -> None:
        import polyattn as pa

        structure = None if make is None else make(pa)
        query, key, value = _drawn(*q), _drawn(*k), _drawn(*k)
        pa.attention(query, key, value, structure=structure, backend=backend, **given)

    return call


def _laser(backend: str) -> None:
    import polyattn as pa
    from polyattn_npu import NpuOptions

    q = _drawn(1, 4096, 1, 64)
    os.environ["MINDIE_SD_FA_TYPE"] = "ascend_laser_attention"
    pa.reload_environment()
    padding = pa.KeyPadding.from_lengths([2304], 4096, queries="all")
    pa.attention(q, q, q, structure=padding, backend=backend, options=(NpuOptions(laser_max_abs=4.0),))
    del os.environ["MINDIE_SD_FA_TYPE"]
    pa.reload_environment()


_S, _L = (2, 8, 4, 64), (2, 6, 4, 64)
_T, _PAGES = (9, 4, 64), (8, 128, 2, 64)
_KEEP = [[True, False, True, True, True, True], [True] * 6]
_DOCUMENTS = ([2, 3, 4], [3, 1, 5])
_TABLE, _KV = [[4, 0, 2], [1, 6, -1]], [300, 130]

PATHS = (
    Path("Causal, no mask", "fusion", _attend(_S, _S, causal=True)),
    Path("Causal, no mask, Sq > Skv", "fusion", _attend(_S, _L, causal=True)),
    Path("Causal with a keep mask", "fusion", _attend(_S, _L, lambda pa: pa.Mask.keys(_KEEP), causal=True)),
    Path("Not causal", "fusion", _attend(_S, _L)),
    Path("Not causal", "mindie", _attend(_S, _L)),
    Path("Not causal, a scale of its own", "mindie", _attend(_S, _L, scale=0.3)),
    Path("Not causal, a keep mask", "mindie", _attend(_S, _L, lambda pa: pa.Mask.keys(_KEEP))),
    Path("Not causal, a keep mask", "fusion", _attend(_S, _L, lambda pa: pa.Mask.keys(_KEEP))),
    Path("Packed [real, pad]", "mindie", _attend(_T, _T, lambda pa: pa.Packed.real_and_pad(5, 9))),
    Path("Packed [real, pad]", "fusion", _attend(_T, _T, lambda pa: pa.Packed.real_and_pad(5, 9))),
    Path("Prefix of the keys, laser", "laser", _laser),
    *(
        Path(f"Quantised, {method}", "quant", _attend((1, 512, 4, 128), (1, 512, 4, 128), quant=method), "A5")
        for method in ("fp8", "mxfp8", "mxfp4")
    ),
    Path("Ours: N documents", "fusion", _attend(_T, _T, lambda pa: pa.Packed.from_lengths(*_DOCUMENTS))),
    Path(
        "Ours: N documents, causal", "fusion",
        _attend(_T, _T, lambda pa: pa.Packed.from_lengths(*_DOCUMENTS), causal=True),
    ),
    Path(
        "Ours: N documents, causal", "fia",
        _attend(_T, _T, lambda pa: pa.Packed.from_lengths(*_DOCUMENTS), causal=True),
    ),
    Path("Ours: a window", "fusion", _attend(_S, _S, window=(2, 1))),
    Path("Ours: an additive bias", "fusion", _attend(_S, _L, lambda pa: pa.Mask(torch.zeros(1, 1, 8, 6)))),
    Path("Ours: spans", "fusion", _attend((1, 8, 4, 64), (1, 8, 4, 64), lambda pa: pa.Spans([[(2, 5)]]))),
    Path("Ours: padding by lengths", "fia", _attend(_S, _S, lambda pa: pa.KeyPadding.from_lengths([8, 5], 8))),
    Path("Ours: pages, causal", "fia", _attend(_S, _PAGES, lambda pa: pa.Paged(_TABLE, _KV), causal=True)),
    Path(
        "Ours: spans over pages", "fia",
        _attend((2, 4, 4, 64), _PAGES, lambda pa: pa.Paged(_TABLE, _KV, None, [[(297, 299)], []])),
    ),
)  # fmt: skip


def main() -> None:
    """argv[1] has the emulated machine; a JSON list of [place in PATHS, backend, op, arguments] is the last line."""
    stack = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with using(**stack):
        from tests.emulators.npu import torch_npu_module
        from tests.emulators.npu.calls import recording

        torch_npu_module.install()
        rows = []
        for place, path in enumerate(PATHS):
            if path.soc == stack["soc"]:
                with recording() as log:
                    path.call(path.backend)
                rows += [(place, path.backend, *_told(call)) for call in log]
    json.dump(rows, sys.stdout)


def _told(call: Any) -> tuple[str, str]:
    """The op, through which of MindIE-SD's functions; its arguments but those that are the schema's defaults."""
    name = f"`{call.op.replace('::', '.')}`"
    said = {n: value for n, value in call.said().items() if n not in ("key", "value", "query_rope")}
    return (f"`{call.through}` → {name}" if call.through else name), ", ".join(f"{n}={v}" for n, v in said.items())


if __name__ == "__main__":
    main()
