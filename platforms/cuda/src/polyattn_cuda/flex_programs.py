"""Compiled calls of flex attention: one program for each kind of call, kept and bounded.

Compiling takes seconds, so a program is left as open as torch allows: sizes are marked as varying, strides are brought
to one form, head dims to the next power of two (which the kernels compute in anyway), and a scale of no common kind and
a softcap come in as tensors. What no program can leave open is its key, so that each compiles once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from polyattn_cuda.flex_blocks import Blocks, Rule, block_mask

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
    blocks: Blocks | None,
    *,
    scale: float,
    softcap: float,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq], -inf on rows that see nothing."""
    width, value_width = q.shape[-1], v.shape[-1]
    with _settled(q.device.type, grad):
        q, k, v = _usual(q), _usual(k), _usual(v)
        usual_scale = not softcap and scale == q.shape[-1] ** -0.5
        factors = () if usual_scale else _factors(scale, softcap, q.device)
        rule, facts, tables, traits = (None, (), (), None) if blocks is None else blocks
        key = (_traits(q), _traits(k), _traits(v), traits, grad)
        asked = (key, rule, len(factors), q.shape[-1] ** -0.5 if usual_scale else 1.0, q.shape[2] != k.shape[2])
        given = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), facts, tables, factors)
        try:
            out, lse = _program(*asked)(*given)
        except RuntimeError as error:
            if not type(error).__name__.endswith("LimitHit"):
                raise
            _program.cache_clear()  # something that no key foresaw: begin again
            out, lse = _program(*asked)(*given)
    return out.transpose(1, 2).narrow(-1, 0, value_width), lse


def _settled(device_type: str, grad: bool) -> ExitStack:
    """Autocast, which has had its say, and a grad mode that changes nothing are part of what a program is made for."""
    stack = ExitStack()
    if torch.is_autocast_enabled(device_type):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    if torch.is_grad_enabled() != grad:
        stack.enter_context(torch.set_grad_enabled(grad))
    return stack


def _usual(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous, its head dim a power of two from 16 on."""
    width = rows.shape[-1]
    spare = max(16, 1 << (width - 1).bit_length()) - width
    return pad(rows, (0, spare)) if spare else rows.contiguous()


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
    return _Marking(compiled(attend))


class _Marking:
    """A program that says at its first call, when it is compiled, which sizes vary."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._compiled = False

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        facts: tuple[torch.Tensor, ...],
        tables: tuple[torch.Tensor, ...],
        factors: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._compiled:
            for rows in (q, k, v):
                _mark(rows, (0, 2))
            for tensor in (*facts, *tables):
                _mark(tensor, range(tensor.dim()))
        result = self._program(q, k, v, facts, tables, factors)
        self._compiled = True
        return result


def _mark(tensor: torch.Tensor, axes: Iterable[int]) -> None:
    for axis in axes:
        if tensor.shape[axis] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)


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
    """What of [B,S,H,D] a program cannot leave open: sizes of 1 are special to torch."""
    batch, length, heads, width = rows.shape
    return rows.dtype, rows.device, heads, width, batch == 1, length == 1, rows.requires_grad
