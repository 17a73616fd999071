"""Which code a launch of a Triton kernel runs, and with what: seen at Triton's runner, with a GPU or without one.

Without a GPU, a driver stands in that compiles for sm_90 and launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget


class Launched(NamedTuple):
    """One launch: the compiled code, the grid, stream and hooks, and the arguments, tensors by their address."""

    code: int
    grid: tuple[int, ...]
    stream: int
    hooks: tuple[Any, Any]
    arguments: tuple[Any, ...]


@contextmanager
def watched() -> Iterator[list[Launched]]:
    """Every launch by Triton's runner from now on, of kernels compiled from now on."""
    seen: list[Launched] = []
    real = triton.runtime.driver.active

    class Runner:
        """Triton's runner for one compiled kernel, or none."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._run = None if isinstance(real, _Absent) else launcher(source, metadata)

        def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *given: Any) -> None:
            packed, about, enter, leave, *arguments = given
            plain = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments)
            seen.append(Launched(function, (x, y, z), stream, (enter, leave), plain))
            if self._run is not None:
                self._run(x, y, z, stream, function, packed, about, enter, leave, *arguments)

    launcher = real.launcher_cls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "launcher_cls", Runner)
        yield seen


class _Absent:
    """A driver of Triton's for a GPU that is not there."""

    launcher_cls: Any = None

    def __init__(self) -> None:
        self._loaded = 0
        self.current = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self._loaded += 1
        return self._loaded, self._loaded, 32, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 1000 + device


@contextmanager
def absent_gpus() -> Iterator[Any]:
    """Two GPUs that are not there, as Triton's driver and as what knows the current device."""
    driver = _Absent()
    before = triton.runtime.driver._active

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        left, driver.current = driver.current, device.index
        yield
        driver.current = left

    triton.runtime.driver.set_active(driver)
    try:
        yield SimpleNamespace(current_device=driver.get_current_device, device=on, is_available=lambda: True)
    finally:
        triton.runtime.driver._active = before
