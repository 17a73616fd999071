"""Finds the living structure that a number stands for: compiled graphs carry tensors, never objects.

Every structure built outside of a graph has a handle, a CPU tensor that holds its number. The number survives whatever
a compiler does to the tensor (copies, detached views, replays), and no other structure of the process ever has it.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from polyattn.structures.base import Structure

_numbers = count(1)
_living: weakref.WeakValueDictionary[int, Structure] = weakref.WeakValueDictionary()


def handle_of(structure: Structure) -> torch.Tensor:
    """A new handle [1] int64 by which `living` finds this structure, as long as it lives."""
    number = next(_numbers)
    _living[number] = structure
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def living(handle: torch.Tensor | None) -> Structure | None:
    """The structure behind a handle, unless it died or its data were written in place since."""
    structure = None if handle is None else _living.get(int(handle))
    return None if structure is None or structure.stale() else structure


def versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    """How often each tensor was written in place; None for inference tensors, which keep no count."""
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)
