"""Runs each emulated backend on fake tensors of a device, in one process: whatever stays on the CPU is an error there.

The device is called `cuda`; a slot does not ask. torch without such devices cannot index their fake tensors either, for
want of a guard, so that it gets the one that it has for lazy tensors, which does nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.vendor import Backend, Found, Machine, Platform

#: Vendor -> its emulated backends.
VENDORS = {"xpu": ("vllm_xpu", "ipex", "sdpa"), "musa": ("mate", "mudnn", "sdpa")}
#: Vendor -> a planted backend, right but for the boundaries, which it makes on the CPU.
PLANTED = {"xpu": "breach_honest", "musa": "breach_left_on_cpu"}


def platform(vendor: str) -> Platform:
    """The vendor's emulated backends as those of the fake device."""
    return Platform(
        name=f"fake{vendor}",
        device_type="cuda",
        priority=99,
        probe=lambda: Found("fake tensors"),
        machine=lambda device: Machine(platform=f"fake{vendor}", device_type="cuda", arch="", name="fake"),
        backends=f"{__name__}:{vendor}_backends",
        order=lambda request, machine: (),
        collective_backend="gloo",
        capturing=None,
        variables=(),
        cache_write=None,
    )


def __getattr__(name: str) -> Any:
    vendor = name.partition("_")[0]
    if vendor not in VENDORS:
        raise AttributeError(name)
    return _backends(vendor) if name.endswith("_backends") else lambda: platform(vendor)


def _backends(vendor: str) -> tuple[Backend, ...]:
    emulated = importlib.import_module(f"tests.emulators.{vendor}.emulated")
    stack = importlib.import_module(f"tests.emulators.{vendor}.stack")
    planted = getattr(importlib.import_module(f"tests.emulators.{vendor}.planted"), PLANTED[vendor])
    found = []
    for name in VENDORS[vendor]:
        with stack.using(**getattr(emulated, "STACKS", {}).get(name, {})):
            found.append(emulated.backend_of(name))
    return (*found, replace(planted(), name="planted"))


def main() -> None:
    """argv[1] is the vendor; {backend: {structure: what came of it}} goes to standard output."""
    vendor = sys.argv[1]
    _guarded()
    emulated = importlib.import_module(f"tests.emulators.{vendor}.emulated")
    for name in VENDORS[vendor]:
        for emulator in emulated.emulators_of(name):
            emulator.install()
    _fake_ops(vendor)

    import polyattn as pa

    structures = {
        "dense": None,
        "packed": pa.Packed.from_lengths([10, 6, 16]),
        "key_padding": pa.KeyPadding.from_lengths([16, 9], 16),
        "paged": pa.Paged([[0, 2], [1, 0]], [14, 5]),
    }
    found: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for name in (*(f"{vendor}_{name}" for name in VENDORS[vendor]), "planted"):
        found[name] = {kind: _outcome(kind, structure, name) for kind, structure in structures.items()}
    json.dump(found, sys.stdout)


def _guarded() -> None:
    """Gives cuda the guard of lazy tensors, in this process for good."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, lazy = 1, 17  # as c10::DeviceType numbers them
    guards[cuda] = guards[lazy]


def _outcome(kind: str, structure: Any, backend: str) -> str:
    import polyattn as pa

    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = {"packed": ((32, 4, 64), (32, 4, 64)), "paged": ((2, 1, 4, 64), (4, 64, 4, 64))}
        q, k = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in shapes.get(kind, ((2, 16, 4, 64), (2, 16, 4, 64)))
        )
        try:
            out = pa.attention(q, k, k, structure=structure, backend=backend)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return f"ran on {out.device.type}"


def _fake_ops(vendor: str) -> None:
    """Shapes for the vendor's ops, which have none of their own; where they look at devices, so does this."""
    if vendor == "xpu":
        from tests.emulators.xpu.vllm_checks import check_devices

        def varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, *rest):  # type: ignore[no-untyped-def]
            check_devices(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
            lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
            return [torch.empty_like(q) if out is None else out, lse]

        torch.library.register_fake("_vllm_fa2_C::varlen_fwd", varlen_fwd)
        functional = importlib.import_module("intel_extension_for_pytorch").llm.functional
        functional.varlen_attention = _ipex


def _ipex(query: Any, key: Any, value: Any, out: Any, seqlen_q: Any, seqlen_k: Any, *rest: Any, **named: Any) -> Any:
    from tests.emulators.xpu.vllm_checks import check_devices

    check_devices(query, key, value, out, seqlen_q, seqlen_k)
    return out


if __name__ == "__main__":
    main()
