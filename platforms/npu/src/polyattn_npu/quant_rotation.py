"""The fixed orthonormal matrix by which q and k are rotated before they are quantised: it spreads outliers."""

from __future__ import annotations

import torch

from polyattn.vendor import device_constant

#: The seed of its signs, shared with vLLM-Omni: the same matrix, so that the same numbers come out.
SEED = 425500


def rotation(device: torch.device, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """[head_dim,head_dim], the same tensor at every call: leave it unchanged. ValueError unless a power of two."""
    if head_dim <= 0 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim: a power of two is needed for the Hadamard rotation, got {head_dim}")
    return _matrix(device, dtype, head_dim)


@device_constant(limit=64)  # a model has a few head dims, dtypes and devices
def _matrix(device: torch.device, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    return (signs(head_dim).float().unsqueeze(1) * hadamard(head_dim)).to(dtype).contiguous().to(device)


def signs(head_dim: int) -> torch.Tensor:
    """int64 [head_dim] of 1 and -1 on the CPU; torch's own random state stays as it is."""
    return draws(head_dim) * 2 - 1


def draws(head_dim: int) -> torch.Tensor:
    """int64 [head_dim] of 0 and 1, the first ones of one sequence."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    return torch.randint(0, 2, (head_dim,), generator=generator, dtype=torch.int64, device="cpu")


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix over the root of its size, float32 on the CPU."""
    matrix = torch.ones(1, 1, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    scaled: torch.Tensor = matrix / float(size) ** 0.5
    return scaled
