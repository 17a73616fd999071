"""Compiles Triton kernels without a GPU, for each architecture that the room of kernels is kept for.

Convention: beside the kernels' tests lies `signatures_<file>.py`, with `SIGNATURES: tuple[Signature, ...]` for the
kernels of `polyattn/kernels/<file>.py`, at least one for every function there named `*_kernel` (what is launched; the
device functions that it calls are named otherwise). `test_compiles_offline.py` finds these files by itself.

A `Signature` names the kernel's arguments in any order, all of them but those with a default that is meant:

    "*bf16"      a pointer; "*bf16:16" a pointer that is a multiple of 16 bytes, which is what torch gives
    "i32", "i64", "fp32"    an argument of that type; "i32:16" one that is a multiple of 16
    anything else           a constant: what a tl.constexpr gets, None for an absent tensor, 1 for a stride that is 1
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Architecture -> Triton's target and the shared memory of one program, in bytes.
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 163_840),
}
ALL = tuple(TARGETS)
#: Schedulers of a processor (SIMDs of a compute unit), on all of these.
SCHEDULERS = 4


@dataclass(frozen=True)
class Signature:
    """One way in which a kernel is launched.

    name       what the test is called
    kernel     the @triton.jit function
    arguments  by name, as above
    options    num_warps, num_stages: those that the launch gives
    targets    architectures on which it is launched that way
    spills_allowed  as `Compiled.spills` counts them; anything but 0 needs its reason beside it
    """

    name: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    targets: tuple[str, ...] = ALL
    spills_allowed: int = 0


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes.

    registers  of a thread
    spills     bytes of a thread (NVIDIA: its stack) or registers (AMD) that did not fit; 0 is good
    shared     bytes of shared memory of a program
    occupancy  warps (waves) that registers and shared memory let one scheduler (SIMD) hold at once; 0: it cannot start
    assembly   the text: PTX or AMD's
    """

    registers: int
    spills: int
    shared: int
    occupancy: int
    assembly: str

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.spills} spilled, {self.shared} bytes shared, "
            f"{self.occupancy} warps a scheduler"
        )


def compiled(signature: Signature, architecture: str) -> Compiled:
    """`signature` compiled to machine code for `architecture`; raises what the compiler raises."""
    target, _ = TARGETS[architecture]
    types, constants, attributes = _as_triton(signature)
    source = ASTSource(signature.kernel, types, constants, attributes)
    kernel = triton.compile(source, target=target, options={"enable_fp_fusion": True, **signature.options})
    shared = kernel.metadata.shared
    if target.backend == "cuda":
        text = kernel.asm["ptx"]
        registers, spills = _usage_of_cubin(kernel.asm["cubin"])
        by_registers = 65_536 // (32 * -(-registers // 8) * 8) // SCHEDULERS
    else:
        text = kernel.asm["amdgcn"]
        registers, spills = _amd(text, "vgpr_count"), _amd(text, "vgpr_spill_count")
        by_registers = int(re.findall(r"; Occupancy: (\d+)", text)[0])
    programs = TARGETS[architecture][1] // shared if shared else 64
    by_shared = -(-programs * kernel.metadata.num_warps // SCHEDULERS)
    return Compiled(registers, spills, shared, min(by_registers, by_shared, 16), text)


def _as_triton(signature: Signature) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    names = signature.kernel.arg_names
    unknown = set(signature.arguments) - set(names)
    assert not unknown, f"{signature.name}: {signature.kernel.__name__} has no argument {sorted(unknown)}"
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, (name, parameter) in enumerate(zip(names, signature.kernel.params, strict=True)):
        given = signature.arguments.get(name, parameter.default)
        if isinstance(given, str):
            types[name], _, multiple = given.partition(":")
            if multiple:
                attributes[(position,)] = [["tt.divisibility", int(multiple)]]
        else:
            types[name], constants[name] = "constexpr", given
    return types, constants, attributes


def _usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, where spilled registers go."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        shown = subprocess.run([tool, "-res-usage", file], check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+)", shown), re.search(r"STACK:(\d+)", shown)
    assert registers is not None, shown
    assert stack is not None, shown
    return int(registers[1]), int(stack[1])


def _amd(assembly: str, field: str) -> int:
    found = re.search(rf"\.{field}:\s*(\d+)", assembly)
    assert found is not None, field
    return int(found[1])
