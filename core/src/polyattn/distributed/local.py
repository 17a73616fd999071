"""The ordinary calls that a rank makes for its part: arguments stated once, pieces answered and put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from polyattn.backends.empty import empty_attention
from polyattn.distributed.merge import Partial
from polyattn.distributed.parts import Part
from polyattn.distributed.visible import Piece
from polyattn.structures import Structure

if TYPE_CHECKING:
    from polyattn.plan import Plan
    from polyattn.routing import Route

Sides = tuple[int | None, int | None]


#: What `LocalCall.stated` has, by name.
STATED = ("scale", "softcap", "backend", "configured choice", "quant", "layer", "deterministic", "options")


@dataclass
class LocalCall:
    """What every ordinary call of a parallel one shares.

    `heads` are what a layer expects of the caller's tensors; `route` is the last ordinary call's.
    """

    scale: float | None
    softcap: float
    backend: str | None
    configured: str | None
    quant: Any
    layer: int | None
    deterministic: bool
    options: Any
    heads: tuple[int, int, int] | None = None
    route: Route | None = field(default=None)

    @property
    def stated(self) -> tuple[Any, ...]:
        """What is stated, hashable, in the order of `STATED`."""
        return (
            self.scale, self.softcap, self.backend, self.configured, self.quant,
            None if self.quant is None else self.layer,  # only quantisation tells layers apart
            self.deterministic,
            self.options if isinstance(self.options, tuple) else repr(self.options),
        )  # fmt: skip

    def plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        structure: Structure | None,
        causal: bool,
        window: Any,
        need_lse: bool,
    ) -> Plan:
        """The plan of one such call; raises as `pa.attention` does."""
        from polyattn.call import find_plan

        plan = find_plan(
            q, k, v, structure, causal, self.scale, window, self.softcap, need_lse, None, self.backend,
            self.configured, self.quant, self.layer, self.deterministic, self.options,
        )  # fmt: skip
        self.route = plan.route
        return plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        structure: Structure | None,
        causal: bool,
        window: Any,
        need_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse or None) of one such call. Without a head there is nothing to compute."""
        if q.shape[2] == 0:
            return empty_attention(q, k, v, need_lse)
        answer = self.plan(q, k, v, structure, causal, window, need_lse).run(q, k, v, None, structure)
        return answer if need_lse else (answer, None)


def run_part(
    call: LocalCall, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, need_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The answer of one part, of q, k and v that hold more rows than it needs."""
    causal, window = arguments_of(part.piece)
    return call.run(*cut_out(part.piece, q, k, v), part.structure, causal, window, need_lse)


def cut_out(
    piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows and samples of a piece, as views."""
    b0, b1 = batch_of(piece, q)
    queries = q[b0:b1, piece.q[0] : piece.q[1]]
    keys, values = (tensor[b0:b1, piece.k[0] : piece.k[1]] for tensor in (k, v))
    return queries, keys, values


def batch_of(piece: Piece, q: torch.Tensor) -> tuple[int, int]:
    """The samples of a piece."""
    return piece.batch or (0, q.shape[0])


def arguments_of(piece: Piece) -> tuple[bool, Sides | None]:
    """(causal, window) that a piece is called with."""
    left, right = piece.window
    causal = right == 0
    if left is None and (right is None or causal):
        return causal, None
    return causal, (left, right)


def covers(part: Part, q: torch.Tensor) -> bool:
    """Whether a part answers every query row of every sample."""
    return part.piece.q == (0, q.shape[1]) and batch_of(part.piece, q) == (0, q.shape[0])


def answer(
    call: LocalCall, parts: tuple[Part, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, need_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The answer of parts that have no query row in common, where all keys are at hand; differentiable."""
    if len(parts) == 1 and covers(parts[0], q):
        return run_part(call, parts[0], q, k, v, need_lse)
    out, lse = empty_attention(q, k, v, need_lse)  # hangs on q, k, v: ranks that see nothing join in the backward too
    for part in parts:
        (b0, b1), (r0, r1) = batch_of(part.piece, q), part.piece.q
        some, some_lse = run_part(call, part, q, k, v, need_lse)
        out[b0:b1, r0:r1] = some
        if lse is not None and some_lse is not None:
            lse[b0:b1, :, r0:r1] = some_lse
    return out, lse


def blanked(
    out: torch.Tensor, lse: torch.Tensor | None, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The answer with 0 and LSE -inf in the query rows [B,S] that are padding."""
    if rows is None:
        return out, lse
    blank = rows[:, :, None, None]
    return (
        out.masked_fill(blank, 0.0),
        None if lse is None else lse.masked_fill(rows[:, None, :], float("-inf")),
    )


def whole_partial(part: tuple[torch.Tensor, torch.Tensor | None]) -> Partial:
    """An answer that was asked for with its LSE."""
    out, lse = part
    assert lse is not None
    return out, lse
