"""Routing and running never read a tensor on the host: proved on fake CUDA tensors, which have no content to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn as pa

READS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique")


class Trap(TorchDispatchMode):
    """Notes every operator that reads a device tensor on the host, and every copy between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name in READS and any(tensor.device.type == "cuda" for tensor in tensors):
            self.reads.append(name)
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and isinstance(result, torch.Tensor) and tensors:
            source = tensors[-1] if name == "copy_" else tensors[0]
            if source.device != result.device:
                self.copies.append(f"{source.device.type} to {result.device.type}")
        return result


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def host_structures() -> dict[str, Any]:
    """Built from host data, outside of any fake mode, as a model's caller does."""
    return {
        "key_padding": pa.KeyPadding.from_lengths([16, 9], 16),
        "key_padding with holes": pa.KeyPadding.from_ranges([[(0, 4), (6, 16)], [(2, 9)]], 16),
        "mask": pa.Mask(torch.rand(2, 16) > 0.5),
        "bias": pa.Mask(torch.randn(2, 4, 16, 16)),
        "packed": pa.Packed.from_lengths([10, 6, 16]),
        "real and pad": pa.Packed.real_and_pad(20, 32),
        "spans": pa.Spans([[(2, 7)], []]),
        "paged": pa.Paged([[0, 2], [1, -1]], [14, 5]),
    }


HOST = host_structures()


def call(name: str, structure: Any, **arguments: Any) -> Any:
    if name in ("packed", "real and pad", "packed on the device"):
        q = cuda(32, 4, 64)
        k = cuda(32, 2, 64)
    elif name.startswith("paged"):
        q, k = cuda(2, 1, 4, 64), cuda(4, 8, 2, 64)
    else:
        q, k = cuda(2, 16, 4, 64), cuda(2, 16, 2, 64)
    return pa.attention(q, k, k, structure=structure, return_lse=True, **arguments)


def _fake_mode_sends_real_tensors() -> bool:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return REAL.to(torch.device("cuda", 0)).device.type == "cuda"
    except (RuntimeError, AssertionError):
        return False


REAL = torch.zeros(1)


@pytest.mark.skipif(
    not _fake_mode_sends_real_tensors(),
    reason="this torch's fake mode copies a real tensor to the device for real, and there is none",
)
@pytest.mark.filterwarnings("ignore::polyattn.environment.PolyattnWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["dense", *HOST])
def test_host_built_structures_are_sent_and_never_read_back(name: str, causal: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Trap() as trap:
        out, lse = call(name, HOST.get(name), causal=causal)
    assert out.device.type == "cuda"
    assert lse.dtype == torch.float32
    assert trap.reads == []
    assert set(trap.copies) <= {"cpu to cuda"}


class Spy(TorchFunctionMode):
    """Notes the methods through which content reaches Python or another device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cpu", "to", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["dense", *HOST])
def test_the_second_layer_neither_reads_nor_moves_a_tensor(name: str) -> None:
    rows = (32,) if name in ("packed", "real and pad") else (2, 1) if name == "paged" else (2, 16)
    q = torch.randn(*rows, 4, 64)
    k = torch.randn(*((4, 8) if name == "paged" else rows), 2, 64)
    structure = HOST.get(name)
    pa.attention(q, k, k, structure=structure)
    with Spy() as spy:
        pa.attention(q, k, k, structure=structure)
    assert spy.calls == []


@pytest.mark.filterwarnings("ignore::polyattn.environment.PolyattnWarning")
@pytest.mark.parametrize("name", ["key_padding", "key_padding lengths", "mask", "packed on the device"])
def test_device_built_structures_are_trusted_and_never_read(name: str) -> None:
    with FakeTensorMode(), Trap() as trap:
        if name == "key_padding":
            structure: Any = pa.KeyPadding.from_mask(torch.ones(2, 16, dtype=torch.bool, device="cuda"))
        elif name == "key_padding lengths":
            structure = pa.KeyPadding.from_lengths(torch.ones(2, dtype=torch.int64, device="cuda"), 16)
        elif name == "mask":
            structure = pa.Mask(torch.ones(2, 16, dtype=torch.bool, device="cuda"))
        else:
            structure = pa.Packed.from_cu_seqlens(torch.ones(4, dtype=torch.int64, device="cuda"), max_q=16)
        out, _ = call(name, structure)
    assert out.device.type == "cuda"
    assert trap.reads == []
    assert trap.copies == []


def test_the_trap_catches_a_read() -> None:
    with FakeTensorMode(), Trap() as trap:
        flags = torch.ones(2, dtype=torch.bool, device="cuda")
        with pytest.raises(Exception, match="data-dependent|Data dependent|_local_scalar_dense"):
            bool(flags.any())
        flags.cpu()
    assert trap.reads or trap.copies
