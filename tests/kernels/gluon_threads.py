"""Gluon's dialect on a processor: a Hopper kernel's own text, its partitions as threads.

A name of the dialect is what a strict reading of the hardware allows: a copy comes at any time before its barrier says
so, a product reads its operands when it starts and again when it is waited for, and both must be the same then; memory
is read and written within bounds. What this cannot see: layouts of registers and swizzled rows, which the compiler is
trusted with, and what a missing fence or barrier of threads does.
"""

from __future__ import annotations

import math
import random
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from polyattn.kernels import video_hopper_kernel, video_hopper_parts

#: What one wait may take, in seconds, before nobody is thought to end it.
_PATIENCE = 60.0
PANEL = 64


class _Stopped(Exception):
    """Another partition failed."""


class _Pointer:
    """A tensor's elements from an offset, or from many."""

    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + offset)


def _load(pointer: _Pointer, mask: Any = True, other: Any = 0) -> torch.Tensor:
    offset, mask = torch.as_tensor(pointer.offset), torch.as_tensor(mask)
    offset, mask = torch.broadcast_tensors(offset, mask)
    asked = offset[mask]
    assert asked.numel() == 0 or 0 <= int(asked.min()) <= int(asked.max()) < pointer.memory.numel()
    found = pointer.memory[offset.clamp(0, pointer.memory.numel() - 1).long()]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def _store(pointer: _Pointer, values: torch.Tensor, mask: Any) -> None:
    offset, mask, values = torch.broadcast_tensors(pointer.offset, mask, values)
    offset, values = offset[mask], values[mask]
    assert offset.unique().numel() == offset.numel()
    assert values.dtype == pointer.memory.dtype
    pointer.memory[offset] = values


class _Barriers:
    """A row of mbarriers, or one of them."""

    def __init__(self, machine: _Machine, count: int) -> None:
        self.machine, self.states = machine, [SimpleNamespace(count=0) for _ in range(count)]

    def index(self, place: Any) -> Any:
        return self.states[int(place)]


class _Memory:
    """Shared memory: the last two axes are a column of panels of 64 columns."""

    def __init__(self, memory: torch.Tensor, offset: int, shape: list[int], turned: bool = False) -> None:
        self.memory, self.offset, self.shape, self.turned, self.dtype = memory, offset, shape, turned, memory.dtype

    def index(self, place: Any) -> _Memory:
        assert 0 <= int(place) < self.shape[0]
        return _Memory(self.memory, self.offset + int(place) * math.prod(self.shape[1:]), self.shape[1:])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> _Memory:
        assert dtype == self.dtype
        assert math.prod(shape) == math.prod(self.shape)
        return _Memory(self.memory, self.offset, shape)

    reinterpret = _reinterpret

    def permute(self, axes: tuple[int, int]) -> _Memory:
        assert axes == (1, 0)
        return _Memory(self.memory, self.offset, self.shape, not self.turned)

    def load(self, layout: Any = None) -> torch.Tensor:
        if len(self.shape) == 1:
            return self.memory[self.offset : self.offset + self.shape[0]].clone()
        rows, columns = self.shape
        flat = self.memory[self.offset : self.offset + rows * columns]
        value = flat.view(columns // PANEL, rows, PANEL).transpose(0, 1).reshape(rows, columns)
        return value.t() if self.turned else value

    def store(self, value: torch.Tensor) -> None:
        if len(self.shape) == 1:
            self.memory[self.offset : self.offset + self.shape[0]] = value
            return
        rows, columns = self.shape
        assert value.shape == (rows, columns)
        assert value.dtype == self.dtype
        panels = value.view(rows, columns // PANEL, PANEL).transpose(0, 1)
        self.memory[self.offset : self.offset + rows * columns] = panels.reshape(-1)


class _Product:
    """A product that has started; nothing may be asked of it before it is waited for."""

    def __init__(self, a: Any, b: _Memory, acc: torch.Tensor, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.first = self.read()
        self.value: torch.Tensor | None = None

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.a.load() if isinstance(self.a, _Memory) else self.a
        return a.clone(), self.b.load().clone()

    def end(self) -> None:
        a, b = self.read()
        for then, now in zip(self.first, (a, b), strict=True):
            assert torch.equal(then.view(torch.int16), now.view(torch.int16)), "an operand changed under a product"
        self.value = a.float() @ b.float() + (self.acc if self.use_acc else 0.0)


class _Machine:
    """One program at a time: its threads, its barriers, and copies on their way."""

    def __init__(self, programs: int, seed: int) -> None:
        self.programs, self.program = programs, 0
        self.lock = threading.Condition()
        self.copies: list[Any] = []
        self.random = random.Random(seed)
        self.errors: list[BaseException] = []
        self.own = threading.local()
        self.running = 0

    # barriers
    def init(self, barrier: Any, count: int) -> None:
        barrier.count, barrier.left, barrier.bytes, barrier.phase = count, count, 0, 0

    def _settle(self, barrier: Any) -> None:
        if barrier.left == 0 and barrier.bytes == 0:
            barrier.phase, barrier.left = barrier.phase + 1, barrier.count
            self.lock.notify_all()

    def arrive(self, barrier: Any, *, count: int = 1) -> None:
        with self.lock:
            assert barrier.left >= count, "more arrivals than a barrier counts"
            barrier.left -= count
            self._settle(barrier)

    def expect(self, barrier: Any, size: int) -> None:
        with self.lock:
            barrier.bytes += size
            barrier.left -= 1
            self._settle(barrier)

    def wait(self, barrier: Any, parity: Any) -> None:
        with self.lock:
            while barrier.phase & 1 == int(parity):
                if self.errors:
                    raise _Stopped
                if not self._copied():
                    assert self.lock.wait(_PATIENCE), "everybody waits"

    # copies
    def load(self, described: Any, place: list[Any], barrier: Any, target: _Memory) -> None:
        with self.lock:
            self.copies.append((described, [int(one) for one in place], barrier, target))
            self.lock.notify_all()

    def _copied(self) -> bool:
        """Let one of the copies come, whichever, or none for now."""
        if not self.copies:
            return False
        described, (row, column), barrier, target = self.copies.pop(self.random.randrange(len(self.copies)))
        rows, columns = described.block_shape
        assert target.shape == [rows, columns]
        assert row >= 0
        whole = described.base.view(-1, described.shape[1])
        value = torch.zeros(rows, columns, dtype=whole.dtype)
        there = whole[row : row + rows, column : column + columns]
        value[: there.shape[0]] = there
        target.store(value)
        barrier.bytes -= value.numel() * value.element_size()
        self._settle(barrier)
        return True

    # products
    def product(self, a: Any, b: _Memory, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool) -> _Product:
        assert is_async
        started = _Product(a, b, acc, use_acc)
        self.own.products = [*getattr(self.own, "products", []), started]
        return started

    def products_end(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        products = self.own.products
        while len(products) > outstanding:
            products.pop(0).end()
        ended = [one.value if isinstance(one, _Product) else one for one in deps]
        assert all(one is not None for one in ended), "a product is used before it ends"
        return ended[0] if len(ended) == 1 else tuple(ended)

    # partitions
    def specialise(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(partitions) == 1 + len(warps)
        assert sum(registers) + registers[0] <= 504
        threads = [threading.Thread(target=self._run, args=one, daemon=True) for one in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
        if self.errors:
            raise next((error for error in self.errors if not isinstance(error, _Stopped)), self.errors[0])
        assert not any(thread.is_alive() for thread in threads)
        assert not self.copies

    def _run(self, function: Any, args: tuple[Any, ...]) -> None:
        try:
            function(*args)
            assert not getattr(self.own, "products", [])
        except BaseException as error:
            with self.lock:
                self.errors.append(error)
                self.lock.notify_all()


def _dialect(machine: _Machine) -> dict[str, Any]:
    """What the kernel's text means by its names."""

    def where(condition: Any, yes: Any, no: Any) -> torch.Tensor:
        return torch.where(*map(torch.as_tensor, (condition, yes, no)))

    def pairwise(function: Any) -> Any:
        return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            return _Barriers(machine, shape[0])
        unknown = math.nan if dtype.is_floating_point else -1
        return _Memory(torch.full((math.prod(shape),), unknown, dtype=dtype), 0, list(shape))

    def atomic_add(pointer: _Pointer, value: int) -> torch.Tensor:
        with machine.lock:
            found = pointer.memory[pointer.offset].clone()
            pointer.memory[pointer.offset] += value
        return found

    class Constant:
        def __new__(cls, value: Any) -> Any:
            return value

    layouts = {name: (lambda *a, **k: None) for name in (
        "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout", "SwizzledSharedLayout"
    )}  # fmt: skip
    gl = SimpleNamespace(
        constexpr=Constant, shared_memory_descriptor=_Memory, int32=torch.int32, int64=torch.int64,
        float32=torch.float32, program_id=lambda axis: machine.program, num_programs=lambda axis: machine.programs,
        load=_load, store=_store, where=where, maximum=pairwise(torch.maximum), minimum=pairwise(torch.minimum),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
        arange=lambda start, end, layout=None: torch.arange(start, end), static_range=range,
        full=lambda shape, value, dtype, layout=None: torch.full(shape, float(value)).to(dtype), atomic_add=atomic_add,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        convert_layout=lambda x, layout: x, allocate_shared_memory=allocate, warp_specialize=machine.specialise,
        **layouts,
    )  # fmt: skip
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=machine.init, wait=machine.wait, arrive=machine.arrive, expect=machine.expect
    )
    return {
        "gl": gl,
        "gluon": SimpleNamespace(jit=lambda *a, **k: a[0] if a else (lambda function: function)),
        "mbarrier": barrier,
        "tma": SimpleNamespace(async_copy_global_to_shared=machine.load),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.products_end,
    }


def launch(kernel: Any, grid: tuple[int, ...], device: Any, *args: Any, **constants: Any) -> None:
    """Stands in for `launch` of a Hopper kernel."""
    for name in ("num_warps", "maxnreg", "enable_fp_fusion"):
        constants.pop(name)
    texts = [Path(str(one.__file__)).read_text() for one in (video_hopper_parts, video_hopper_kernel)]
    imports = r"^from (triton|polyattn)\S* import (\(.*?\)|[^(]*?)$"
    codes = [compile(re.sub(imports, "", text, flags=re.MULTILINE | re.DOTALL), "text", "exec") for text in texts]
    given = [
        _Pointer(one.as_strided((_extent(one),), (1,)), 0) if isinstance(one, torch.Tensor)
        else torch.tensor(one) if isinstance(one, (int, float)) else one
        for one in args
    ]  # fmt: skip
    for program in range(grid[0]):
        machine = _Machine(grid[0], seed=program)
        machine.program = program
        names = _dialect(machine)
        for code in codes:
            exec(code, names)
        names[kernel.__name__](*(_fresh(one) for one in given), **constants)
        assert not machine.copies


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _fresh(one: Any) -> Any:
    return one.clone() if isinstance(one, torch.Tensor) else one
