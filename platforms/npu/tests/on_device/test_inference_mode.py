"""Every structure under torch.inference_mode, in which a model is served: as without it, and what it leaves trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import DEVICE, assert_near, exact, qkv

pytestmark = pytest.mark.npu

QUERIES, KEYS = 6, 8
KEPT = torch.tensor([[True] * 5 + [False] * 3, [False, True] * 4])


def drawn_bias() -> torch.Tensor:
    return torch.randn(2, 4, QUERIES, KEYS, generator=torch.Generator().manual_seed(3))


#: The same structure on a device, each time anew.
STRUCTURES: dict[str, Callable[[str], pa.Structure | None]] = {
    "dense": lambda device: None,
    "boolean mask": lambda device: pa.Mask((drawn_bias()[:, :1] > -0.5).to(device)),
    "float mask": lambda device: pa.Mask(drawn_bias().half().to(device)),
    "lengths on the host": lambda device: pa.KeyPadding.from_lengths([5, 8], KEYS, queries="all"),
    "padding with holes": lambda device: pa.KeyPadding.from_mask(KEPT, queries="all"),
    "padding on the device": lambda device: pa.KeyPadding.from_mask(KEPT.to(device), queries="all"),
}
#: Backend (None: automatic choice) and the structures that it takes with these calls.
TAKEN = [
    *((backend, name) for backend in (None, "fusion", "blocked") for name in STRUCTURES),
    ("fia", "boolean mask"),
    ("fia", "lengths on the host"),
    *(("sdpa", name) for name in STRUCTURES if name != "padding on the device"),
]
taken = pytest.mark.parametrize(("backend", "name"), TAKEN, ids=[f"{name}-{b or 'auto'}" for b, name in TAKEN])


@taken
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("inside", [False, True], ids=["given", "made inside"])
def test_inference_mode_changes_nothing(backend: str | None, name: str, causal: bool, inside: bool) -> None:
    if not inside:
        q, k, v, structure = *qkv((2, QUERIES), (2, KEYS)), STRUCTURES[name](DEVICE)
    with torch.inference_mode():
        if inside:
            q, k, v, structure = *qkv((2, QUERIES), (2, KEYS)), STRUCTURES[name](DEVICE)
        outs = [pa.attention(q, k, v, structure=structure, causal=causal, backend=backend) for _ in range(2)]
    want = exact(q, k, v, structure=STRUCTURES[name]("cpu"), causal=causal)
    for out in outs:
        assert_near(out, want)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_first_used_in_inference_mode_serves_training(name: str) -> None:
    q, k, v = qkv((2, QUERIES), (2, KEYS))
    structure = STRUCTURES[name](DEVICE)
    with torch.inference_mode():
        pa.attention(q, k, v, structure=structure, causal=True)
    q = q.clone().requires_grad_()
    pa.attention(q, k, v, structure=structure, causal=True).sum().backward()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


def test_sdpa_is_refused_padding_that_reaches_its_op_as_a_mask_of_one_row() -> None:
    q, k, v = qkv((2, QUERIES), (2, KEYS))
    structure = STRUCTURES["padding on the device"](DEVICE)
    with pytest.raises(pa.UnsupportedRequest, match="broadcasts none"):
        pa.attention(q, k, v, structure=structure, backend="sdpa")
