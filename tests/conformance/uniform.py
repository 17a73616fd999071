"""Inputs whose answers are plain means: q = 0 makes the weights uniform over the visible keys."""

import torch

from polyattn.reference import reference_attention

NAN, INF = float("nan"), float("inf")


def rows(*values: float) -> torch.Tensor:
    """[1,S,1,1] of these values."""
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)


def zeros(length: int, batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, length, 1, 4)


def answer(q: torch.Tensor, v: torch.Tensor, **arguments) -> list[float]:
    """The reference's output with uniform weights, flat; k holds zeros."""
    k = torch.zeros(*v.shape[:-1], q.shape[-1])
    return reference_attention(q, k, v, **arguments).flatten().tolist()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
