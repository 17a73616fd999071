"""Which launches of a kernel run the same compiled code: what Triton specialises on, as a key that is quick to make.

Triton looks at each argument: the dtype of a tensor and whether its address is a multiple of 16; of an integer whether
it is 1, a multiple of 16, or too large for 32 bits, as far as the kernel lets it; and the value of a constant. The key
tells apart everything that Triton does, and sometimes more.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

_INT32 = 1 << 31
_TENSORS = (torch.Tensor, torch.nn.Parameter)
#: Types that decide by themselves: Triton does not look at the value.
_TYPED = (float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the arguments that decide about the code by more than their type.

    tensors    all tensors
    addresses  of each tensor, whether its address counts
    widths     integers of which the width alone counts
    values     integers that count as 1, as multiples of 16, by their width
    constants  what is a constant of the code
    """

    tensors: tuple[int, ...]
    addresses: tuple[bool, ...]
    widths: tuple[int, ...]
    values: tuple[int, ...]
    constants: tuple[int, ...]


def layout_of(parameters: Any, types: tuple[type, ...]) -> Layout | None:
    """The layout of arguments of `types` for a kernel's first parameters; None where a type is not one we know."""
    tensors: list[int] = []
    addresses: list[bool] = []
    widths: list[int] = []
    values: list[int] = []
    constants: list[int] = []
    for position, (parameter, kind) in enumerate(zip(parameters, types, strict=False)):
        if parameter.is_constexpr:
            constants.append(position)
        elif kind in _TENSORS:
            tensors.append(position)
            addresses.append(not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment))
        elif kind is int:
            (widths if parameter.do_not_specialize else values).append(position)
        elif kind not in _TYPED:
            return None
    return Layout(tuple(tensors), tuple(addresses), tuple(widths), tuple(values), tuple(constants))


def key_of(layout: Layout, args: tuple[Any, ...]) -> tuple[tuple[Hashable, ...], list[int]]:
    """What decides about the code, beside the types of `args`, and the addresses of the tensors."""
    key: list[Hashable] = []
    addresses = []
    low = 0
    for at, counts in zip(layout.tensors, layout.addresses, strict=True):
        tensor = args[at]
        address = tensor.data_ptr()
        addresses.append(address)
        if counts:
            low |= address
        key += (tensor.dtype, tensor.get_device())
    key.append(tuple(address & 15 == 0 for address in addresses) if low & 15 else None)
    if layout.widths:
        numbers = [args[at] for at in layout.widths]
        small = max(numbers) < _INT32 and min(numbers) >= -_INT32
        key.append(None if small else tuple(map(_width, numbers)))
    for at in layout.values:
        number = args[at]
        key.append(number == 1 or (number % 16 == 0, _width(number)))
    for at in layout.constants:
        key.append(args[at])
    return tuple(key), addresses


def _width(number: int) -> int:
    """The bytes of a signed integer that holds `number`: 4, 8, or 16 for those past 64 bits."""
    return 4 if -_INT32 <= number < _INT32 else 8 if -(1 << 63) <= number < 1 << 63 else 16
