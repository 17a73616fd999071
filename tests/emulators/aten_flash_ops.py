"""torch's flash attention ops (`aten::_flash_attention_forward` and kin) for CPU tensors, by an emulator's functions.

What one vendor's build of them does is that vendor's emulator's: their rules have little in common but the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: list[torch.library.Library] = []


def register(forward: Callable[..., Any], forward_into: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """In this process for good; `forward_into` writes into an output, where this torch has that op."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        library.impl("_flash_attention_forward_no_dropout_inplace", forward_into, "CPU")
    _library.append(library)


def answer(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the forward op gives: out, lse, rng_state, unused, debug mask."""
    return out, lse, torch.zeros(2, dtype=torch.uint64), out.new_empty(0), out.new_empty(0)
