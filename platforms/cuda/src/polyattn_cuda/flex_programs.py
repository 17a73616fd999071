"""Compiled calls of flex attention: one program for each kind of call, kept and bounded.

Sizes may vary within a program, which torch learns at the second size it sees. What would make a program of its own
anyway (dtypes, heads, head dims, scale, which rule) is its key, so that torch's limit on recompilations stays far.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

Program = Callable[..., tuple[torch.Tensor, torch.Tensor]]

#: Programs kept.
_LIMIT = 256

#: float32 in full, whatever torch's global settings say of TF32; always the kernel for many queries, which is the one
#: that knows every feature.
_OPTIONS = {"FLOAT32_PRECISION": "'ieee'", "FORCE_USE_FLEX_ATTENTION": True}

_number = count().__next__

#: Compiles a program.
compiled = partial(torch.compile, fullgraph=True)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: BlockMask | None,
    *,
    scale: float,
    softcap: float,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,H,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv] -> out [B,H,Sq,Dv], lse [B,H,Sq], -inf on rows that see nothing."""
    key = (_traits(q), _traits(k), _traits(v), q.shape[2] == k.shape[2], _traits_of_blocks(blocks), grad)
    grouped = q.shape[1] != k.shape[1]
    try:
        return _program(key, scale, softcap, grouped)(q, k, v, blocks)
    except RuntimeError as error:
        if not type(error).__name__.endswith("LimitHit"):
            raise
    _program.cache_clear()  # sizes and strides that no key foresaw: begin again
    return _program(key, scale, softcap, grouped)(q, k, v, blocks)


@lru_cache(maxsize=_LIMIT)
def _program(key: Hashable, scale: float, softcap: float, grouped: bool) -> Program:
    """A program that is torch's own object of compilation, so that no other's recompilations count against it."""
    score = _capped(softcap) if softcap else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: BlockMask | None) -> Any:
        result: Any = flex.flex_attention(  # type: ignore[call-overload]  # its keywords are this torch's
            q, k, v, score_mod=score, block_mask=blocks, scale=scale, enable_gqa=grouped, kernel_options=_OPTIONS,
            **_WITH_LSE,
        )  # fmt: skip
        return result[0], getattr(result[1], "lse", result[1])

    attend.__code__ = attend.__code__.replace(co_name=f"attend_{_number()}")
    program: Program = compiled(attend)
    return program


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


#: How this torch is asked for the LSE.
_WITH_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)


def _traits(tensor: torch.Tensor) -> Hashable:
    """What of [B,H,S,D] a program cannot leave open: sizes of 1 are special to torch, so is the order of strides."""
    batch, heads, rows, width = tensor.shape
    rows_outside = tensor.stride(2) >= tensor.stride(1)
    single = (batch == 1, rows == 1)
    return tensor.dtype, tensor.device, heads, width, single, tensor.requires_grad, rows_outside, tensor.stride(3) == 1


def _traits_of_blocks(blocks: BlockMask | None) -> Hashable:
    if blocks is None:
        return None
    batch, heads, rows, columns = blocks.kv_indices.shape
    return blocks.mask_mod.__code__, batch == 1, heads == 1, rows == 1, columns == 1
