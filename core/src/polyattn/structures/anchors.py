"""Finds the living structure that a tensor stands for: compiled graphs carry tensors, never objects."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from polyattn.structures.base import Structure

_living: dict[int, weakref.ref[Structure]] = {}


def remember(structure: Structure) -> None:
    """Let `from_anchor` find this structure by its first anchor, as long as it lives."""
    for anchor in structure.anchors()[:1]:
        _living[id(anchor)] = weakref.ref(structure, partial(_forget, id(anchor)))


def _forget(key: int, _: object) -> None:
    _living.pop(key, None)


def from_anchor(anchor: torch.Tensor) -> Structure | None:
    """The living structure whose first anchor is this very tensor object, unless its content changed since.

    Structures own their anchors (a tensor object is never the anchor of two), so that the answer is never another's.
    """
    reference = _living.get(id(anchor))
    structure = reference() if reference is not None else None
    if structure is None or structure.anchors()[0] is not anchor or structure.stale():
        return None
    return structure


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor object of one's own over the same memory, so that it can be an anchor."""
    return tensor.view_as(tensor)


def versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    """How often each tensor was written in place; None for inference tensors, which keep no count."""
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)
