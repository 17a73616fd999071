"""One kernel with every sort of argument, the device that it is launched on, and the ways that arguments differ."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from polyattn.kernels import launch as launching
from polyattn.kernels.launch import launch
from tests.kernels.launches import absent_gpus


@triton.jit(do_not_specialize=("rows", "far"), do_not_specialize_on_alignment=("loose",))
def fill_kernel(out, given, loose, absent, rows, far, step, weight, flag, BLOCK: tl.constexpr, ADD: tl.constexpr = 0):
    """out[i * step] = given[i] + loose[0] + what the numbers are, for i < rows."""
    at = tl.arange(0, BLOCK)
    more = weight + far.to(tl.float32) + ADD
    if absent is not None:
        more += tl.load(absent)
    if flag:
        more += 1.0
    values = tl.load(given + at, mask=at < rows, other=0.0).to(tl.float32) + tl.load(loose).to(tl.float32) + more
    tl.store(out + at * step, values, mask=at < rows)


@contextmanager
def launched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, str]]:
    """The device that is launched on, and where tensors are: the GPU, or the CPU for one that is not there.

    The present version of Triton is taken for a verified one: whether it is one, these tests say.
    """
    monkeypatch.setattr(launching, "_VERIFIED", {("cuda", launching._version())})
    monkeypatch.setattr(launching, "_variants", {})
    fill_kernel.device_caches.clear()
    launching._direct.cache_clear()
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device()), "cuda"
        launching._direct.cache_clear()
        return
    with absent_gpus() as module:
        monkeypatch.setattr(launching, "_module", lambda kind: module)
        yield torch.device("cuda", 0), "cpu"
        fill_kernel.device_caches.clear()
        monkeypatch.undo()
        gc.collect()  # code that is let go of is unloaded by the driver that loaded it
    launching._direct.cache_clear()


def arguments(where: str, **changed: Any) -> dict[str, Any]:
    """What the kernel is launched with, in its order, constants last."""
    given = {
        "out": torch.zeros(256, device=where), "given": torch.arange(64.0, device=where),
        "loose": torch.ones(8, device=where), "absent": None, "rows": 20, "far": 3, "step": 2, "weight": 0.5,
        "flag": False, "BLOCK": 32,
    }  # fmt: skip
    return given | changed


def variations(where: str) -> dict[str, dict[str, Any]]:
    """Every way in which arguments differ for Triton, and ways in which they do not."""
    shifted = torch.arange(65.0, device=where)
    return {
        "as it is": {},
        "misaligned": {"given": shifted[1:]},
        "aligned in the middle": {"given": shifted[4:]},
        "output misaligned": {"out": torch.zeros(257, device=where)[1:]},
        "misaligned where it does not count": {"loose": torch.ones(9, device=where)[1:]},
        "another dtype": {"given": torch.arange(64, device=where, dtype=torch.float16)},
        "another dtype where alignment does not count": {"loose": torch.ones(8, device=where, dtype=torch.float64)},
        "parameter": {"given": torch.nn.Parameter(torch.arange(64.0, device=where))},
        "nothing there": {"given": torch.empty(0, device=where), "rows": 0},
        "present": {"absent": torch.ones(1, device=where)},
        "step 1": {"step": 1},
        "step 16": {"step": 16, "rows": 16},
        "step 48": {"step": 48, "rows": 4},
        "step 0": {"step": 0},
        "step 3": {"step": 3},
        "step of 64 bits": {"step": 2**40, "rows": 1},
        "step of 64 bits that 16 does not divide": {"step": 2**40 + 1, "rows": 1},
        "negative step": {"step": -(2**31) - 1, "rows": 1},
        "other rows": {"rows": 21},
        "rows 1": {"rows": 1},
        "rows 16": {"rows": 16},
        "far, 32 bits": {"far": 2**31 - 1},
        "far, 64 bits": {"far": 2**31},
        "far below, 32 bits": {"far": -(2**31)},
        "far below, 64 bits": {"far": -(2**31) - 1},
        "far, unsigned": {"far": 2**63},
        "far, the last of 64 bits": {"far": 2**63 - 1},
        "weight": {"weight": 2.0},
        "weight that is whole": {"weight": 2},
        "flag": {"flag": True},
        "flag that is a number": {"flag": 1},
        "another constant": {"BLOCK": 64},
        "a default constant": {"ADD": 2},
        "a constant that equals another": {"ADD": True},
    }


VARIATIONS = tuple(variations("cpu"))


def by_us(device: torch.device, given: list[Any], constants: dict[str, Any]) -> None:
    launch(fill_kernel, (3, 2), device, *given, **constants)


def by_triton(device: torch.device, given: list[Any], constants: dict[str, Any]) -> None:
    fill_kernel[(3, 2)](*given, enable_fp_fusion=True, **constants)


def split(given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    constants = {name: given[name] for name in ("BLOCK", "ADD") if name in given}
    return [value for name, value in given.items() if name not in constants], constants


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that Triton itself is asked to launch."""
    asked: list[int] = []
    real = type(fill_kernel).run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(1)
        return real(self, *args, **options)

    patch.setattr(type(fill_kernel), "run", run)
    return asked
