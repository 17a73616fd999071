"""The types of slots and kernels, and the two things that every forward does with its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Result = tuple[torch.Tensor, torch.Tensor | None]

#: (left, right) inclusive counts beside the bottom-right diagonal, None unbounded; None: no window.
Window = tuple[int | None, int | None] | None

#: A function in the slot convention of `polyattn.vendor`.
SlotCall = Callable[..., Result]


class Kernel(Protocol):
    """One attention call of torch: q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq] | None.

    mask    None, bool (True = may attend) or additive (-inf hides), [B|1,H|1,Sq|1,Sk]
    causal  only where Sq == Sk, and without a mask
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        softcap: float,
        need_lse: bool,
    ) -> Result: ...


def written(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """`result`, in the caller's buffer where there is one."""
    return result if out is None else out.copy_(result)


def wants_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd records what is done with one of these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
