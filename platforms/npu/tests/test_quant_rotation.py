"""npu:quant's rotation: the field's own signs, orthonormal, one tensor for all calls."""

from __future__ import annotations

import hashlib

import pytest
import torch

from polyattn_npu.quant_rotation import draws, rotation, signs

CPU = torch.device("cpu")


def test_the_signs_are_those_of_the_field() -> None:
    drawn = draws(128).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(drawn).hexdigest() == "5914546b53c3736d2807847bd9c92428e47a98c146f3c79955d47f6de992d18e"
    assert signs(16).tolist() == [1, 1, 1, -1, -1, 1, -1, 1, 1, -1, -1, 1, 1, -1, -1, -1]
    assert torch.equal(signs(64), signs(256)[:64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 32, 64, 128, 256])
def test_the_rotation_is_orthonormal_and_kept(dtype, head_dim) -> None:
    state = torch.random.get_rng_state()
    matrix = rotation(CPU, dtype, head_dim)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert rotation(CPU, dtype, head_dim) is matrix
    wide = matrix.double()
    torch.testing.assert_close(wide.T @ wide, torch.eye(head_dim).double(), atol=3e-4, rtol=0)
    assert bool((wide.abs() - head_dim**-0.5).abs().max() < 1e-3)
    assert matrix.is_contiguous()


def test_the_rotation_outlives_inference_and_fake_modes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.inference_mode():
        assert not rotation(CPU, torch.float64, 16).is_inference()
    kept = rotation(CPU, torch.float64, 8)
    with FakeTensorMode():
        assert rotation(CPU, torch.float64, 8) is not kept
        rotation(CPU, torch.float64, 4)
    assert rotation(CPU, torch.float64, 8) is kept
    assert type(rotation(CPU, torch.float64, 4)) is torch.Tensor


@pytest.mark.parametrize("head_dim", [0, -4, 96, 3])
def test_a_rotation_needs_a_power_of_two(head_dim) -> None:
    with pytest.raises(ValueError, match=str(head_dim)):
        rotation(CPU, torch.float32, head_dim)
