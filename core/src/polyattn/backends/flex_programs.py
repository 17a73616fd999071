"""Compiled calls of flex attention: one program for each kind of call, kept and bounded.

Compiling takes seconds, so a program is left as open as torch allows: sizes are marked as varying, strides are brought
to one form, head dims to the next power of two (which the kernels compute in anyway), and a scale of no common kind and
a softcap come in as tensors. What no program can leave open is its key, so that each compiles once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from polyattn.backends.flex_blocks import Blocks, Rule, block_mask, leave_open

Program = Callable[..., tuple[torch.Tensor, torch.Tensor]]

#: Programs kept.
_LIMIT = 256

#: float32 in full, whatever torch's global settings say of TF32; always the kernel for many queries, which is the one
#: that knows every feature.
_OPTIONS = {"FLOAT32_PRECISION": "'ieee'", "FORCE_USE_FLEX_ATTENTION": True}

_FUNCTORCH = tuple(
    getattr(torch._C.DispatchKey, f"FuncTorch{layer}")
    for layer in ("Batched", "VmapMode", "DynamicLayerFrontMode", "DynamicLayerBackMode", "GradWrapper")
)

_number = count().__next__

#: Compiles a program.
compiled = partial(torch.compile, fullgraph=True)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks | None,
    *,
    scale: float,
    softcap: float,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq], -inf on rows that see nothing."""
    length, scale_of_width, value_width = q.shape[1], q.shape[-1] ** -0.5, v.shape[-1]
    with _settled(q.device.type, grad):
        q, k, v = _usual(q, 2), _usual(k, 1), _usual(v, 1)
        common = not softcap and scale == scale_of_width == q.shape[-1] ** -0.5
        factors = () if common else _factors(scale, softcap, q.device)
        rule, facts, tables, traits = (None, (), (), None) if blocks is None else blocks
        key = (_traits(q), _traits(k), _traits(v), traits, grad)
        asked = (key, rule, len(factors), scale if common else 1.0, q.shape[2] != k.shape[2])
        heads_first = (rows.transpose(1, 2) for rows in (q, k, v))
        given = (*(leave_open(rows, (0, 2)) for rows in heads_first), facts, tables, factors)
        try:
            out, lse = _program(*asked)(*given)
        except RuntimeError as error:
            if not type(error).__name__.endswith("LimitHit"):
                raise
            _program.cache_clear()  # something that no key foresaw: begin again
            out, lse = _program(*asked)(*given)
    out = out.transpose(1, 2)
    if out.shape[1] != length:
        out, lse = out.narrow(1, 0, length), lse.narrow(2, 0, length)
    return (out if out.shape[-1] == value_width else out.narrow(-1, 0, value_width)), lse


def _settled(device_type: str, grad: bool) -> ExitStack:
    """What is around the call and changes nothing, but that programs would be compiled for: autocast, the grad mode.

    Below an operator of a compiled graph torch shuts functorch's layers out, without which flex is not traced.
    """
    stack = ExitStack()
    if torch.is_autocast_enabled(device_type):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    if torch.is_grad_enabled() != grad:
        stack.enter_context(torch.set_grad_enabled(grad))
    if torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTORCH[0]):
        shut_out = torch._C._dispatch_tls_local_exclude_set()
        for layer in _FUNCTORCH:
            shut_out = shut_out - torch._C.DispatchKeySet(layer)
        stack.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), shut_out))
    return stack


def _usual(rows: torch.Tensor, least: int) -> torch.Tensor:
    """Contiguous, of `least` rows or more, its head dim a power of two from 16 on."""
    width = rows.shape[-1]
    spare, missing = max(16, 1 << (width - 1).bit_length()) - width, max(0, least - rows.shape[1])
    return pad(rows, (0, spare, 0, 0, 0, missing)) if spare or missing else rows.contiguous()


def _factors(scale: float, softcap: float, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What scores are multiplied by: the scale; or what a tanh is taken of, and what it is multiplied by."""
    values = (scale / softcap, softcap) if softcap else (scale,)
    return tuple(torch.full((), value, dtype=torch.float32, device=device) for value in values)


@lru_cache(maxsize=_LIMIT)
def _program(key: Hashable, rule: Callable[..., Rule] | None, factors: int, scale: float, grouped: bool) -> Program:
    """A program that is torch's own object of compilation, so that no other's recompilations count against it."""
    make_score = (None, _scaled, _capped)[factors]

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        facts: tuple[torch.Tensor, ...],
        tables: tuple[torch.Tensor, ...],
        factors: tuple[torch.Tensor, ...],
    ) -> Any:
        result: Any = flex.flex_attention(  # type: ignore[call-overload]  # its keywords are this torch's
            q, k, v, score_mod=None if make_score is None else make_score(*factors),
            block_mask=None if rule is None else block_mask(rule, facts, tables, q.shape[2], k.shape[2]),
            scale=scale, enable_gqa=grouped, kernel_options=_OPTIONS, **_WITH_LSE,
        )  # fmt: skip
        return result[0], getattr(result[1], "lse", result[1])

    attend.__code__ = attend.__code__.replace(co_name=f"attend_{_number()}")
    program: Program = compiled(attend)
    return program


def _scaled(by: torch.Tensor) -> Callable[..., torch.Tensor]:
    def scaled(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return score * by

    return scaled


def _capped(by: torch.Tensor, softcap: torch.Tensor) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score * by)

    return capped


#: How this torch is asked for the LSE.
_WITH_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)


def _traits(rows: torch.Tensor) -> Hashable:
    """What of [B,S,H,D] a program cannot leave open: a size of 1 is special to torch, so queries have two rows."""
    batch, length, heads, width = rows.shape
    return rows.dtype, rows.device, heads, width, batch == 1, length == 1, rows.requires_grad
