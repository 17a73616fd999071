"""The ring: keys and values go from place to place while each attends to what it holds; never more than two shards.

Before the ordinary call of a step is made, its keys are sent on and the next ones are asked for, so that both happen at
once: a collective's own stream carries them, and waiting for it is all the order that memory needs, since every buffer
is written and freed on the caller's stream. Keys that no later place sees are not passed on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from polyattn.distributed.chunks import Chunks, RingPlan
from polyattn.distributed.failure import Communicating
from polyattn.distributed.local import LocalCall, batch_of, covers, run_part, whole_partial
from polyattn.distributed.merge import Partial, accumulator, merge_into, nothing_seen
from polyattn.distributed.peers import Peers, finish
from polyattn.distributed.ring_gradient import gradients


def ring(
    call: LocalCall,
    plan: RingPlan,
    peers: Peers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: bool,
) -> Partial:
    """(out, lse) of q [B,S,h,D] over the keys of all places; k, v [B,own rows,hk,D] are this place's own."""
    if not grad:
        out, lse = _forward(call, plan, peers, q, k, v)
        return out.to(q.dtype), lse
    result: Partial = _Ring.apply(call, plan, peers, q, k, v)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: LocalCall,
        plan: RingPlan,
        peers: Peers,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Partial:
        out, lse = _forward(call, plan, peers, q, k, v)
        ctx.call, ctx.plan, ctx.peers = call, plan, peers
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype, copy=True), lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> Any:
        with Communicating(ctx.peers.group, "the backward of ring"):
            grads = gradients(ctx.call, ctx.plan, ctx.peers, ctx.saved_tensors, grad_out, grad_lse)
        return None, None, None, *grads


def _forward(
    call: LocalCall, plan: RingPlan, peers: Peers, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Partial:
    total: Partial | None = None
    chunks = Chunks(plan, peers, k, v)
    for step, parts in enumerate(plan.parts):
        on_the_way = chunks.pass_on(step)
        keys, values = chunks.held(step)
        for part in parts:
            out, lse = whole_partial(run_part(call, part, q, keys, values, True))
            if total is None and covers(part, q):
                total = out.to(accumulator(out.dtype)), lse
                continue
            total = nothing_seen(q, v.shape[-1]) if total is None else total
            merge_into(total, (out, lse), part.piece.q, batch_of(part.piece, q))
        finish(on_the_way)
    return nothing_seen(q, v.shape[-1]) if total is None else total
