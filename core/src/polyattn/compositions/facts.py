"""Facts of the tensors that a composition makes of a request's, for its inner request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.door.request import Request, StructureFacts, TensorFacts


def resized(tensor: TensorFacts, axis: int, size: int) -> TensorFacts:
    """A view of `tensor` with another size along `axis`."""
    shape = tuple(size if index == axis else length for index, length in enumerate(tensor.shape))
    return TensorFacts(shape, tensor.stride, tensor.dtype)


def batched(tensor: TensorFacts) -> TensorFacts:
    """A view of [T,H,D] as [1,T,H,D]."""
    return TensorFacts((1, *tensor.shape), (tensor.shape[0] * tensor.stride[0], *tensor.stride), tensor.dtype)


def copied(tensor: TensorFacts, shape: tuple[int, ...]) -> TensorFacts:
    """A row-major copy of that shape."""
    return TensorFacts.contiguous(shape, tensor.dtype)


def inner(
    request: Request, kind: str, q: TensorFacts, k: TensorFacts, v: TensorFacts, facts: StructureFacts, **changed: Any
) -> Request:
    """`request` for other tensors and another structure; compositions write `out` themselves."""
    return replace(request, structure_kind=kind, structure_facts=facts, q=q, k=k, v=v, out=False, **changed)
