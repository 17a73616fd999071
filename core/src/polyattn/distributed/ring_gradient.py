"""The ring's backward: every step is computed anew, and the gradient of keys travels behind them, home at last.

Training therefore holds no more keys than inference does. All keys go all the way round, seen or not: a gradient's way
home is then the ring's own last step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from polyattn.distributed.chunks import Chunks, RingPlan, packed, unpacked
from polyattn.distributed.local import LocalCall, arguments_of, batch_of, cut_out, whole_partial
from polyattn.distributed.merge import Partial, accumulator
from polyattn.distributed.parts import Part
from polyattn.distributed.peers import Peers, finish, start

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients(
    call: LocalCall,
    plan: RingPlan,
    peers: Peers,
    saved: tuple[torch.Tensor, ...],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> Tensors:
    """Gradients of q, k, v from those of (out, lse); `saved` is q, k, v and the merged out and lse, in float32."""
    q, k, v, out, lse = saved
    plan = replace(plan, wanted=((True,) * plan.places,) * plan.places)
    sums = accumulator(q.dtype)
    grad_q, grad_k, grad_v = (torch.zeros_like(tensor, dtype=sums) for tensor in (q, k, v))
    chunks = Chunks(plan, peers, k, v)
    travelling = None
    for step, parts in enumerate(plan.parts):
        on_the_way = chunks.pass_on(step)
        keys, values = chunks.held(step)
        grads = (grad_k, grad_v)
        if step:
            grads = torch.zeros_like(keys, dtype=sums), torch.zeros_like(values, dtype=sums)
        for part in parts:
            _add(call, part, (q, keys, values), (out, lse), (grad_out.to(sums), grad_lse), (grad_q, *grads))
        finish(on_the_way)
        if step:
            mine = packed(*grads)
            travelling = _passed_on(mine if travelling is None else travelling + mine, plan, step, peers)
    if travelling is not None:
        rows = slice(plan.lead, plan.lead + plan.sizes[plan.place])
        for grad, back in zip((grad_k, grad_v), unpacked(travelling, k.shape[2], chunks.widths), strict=True):
            grad[:, rows] += back
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _passed_on(mine: torch.Tensor, plan: RingPlan, step: int, peers: Peers) -> torch.Tensor:
    """Send the gradient of a step's keys to the next place; the one that arrives is of the next step's keys."""
    arriving = mine.new_empty(plan.sizes[plan.origin(step + 1)], *mine.shape[1:])
    finish(start([*peers.send(mine, plan.after), *peers.receive(arriving, plan.before)]))
    return arriving


def _add(call: LocalCall, part: Part, tensors: Tensors, whole: Partial, upstream: Partial, totals: Tensors) -> None:
    """Add the gradients of one part.

    The whole is sum_i w_i * out_i with w_i = exp(lse_i - lse). So out_i gets w_i * grad, and lse_i, on which all the
    weights depend, w_i * (grad . (out_i - out) + grad of lse).
    """
    if tensors[0].shape[2] == 0:
        return
    (b0, b1), (r0, r1), (k0, k1) = batch_of(part.piece, tensors[0]), part.piece.q, part.piece.k
    causal, window = arguments_of(part.piece)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in cut_out(part.piece, *tensors)]
        out, lse = whole_partial(call.run(inputs[0], inputs[1], inputs[2], part.structure, causal, window, True))
    rows_out, rows_lse = whole[0][b0:b1, r0:r1], whole[1][b0:b1, :, r0:r1]
    grad_out, grad_lse = upstream[0][b0:b1, r0:r1], upstream[1][b0:b1, :, r0:r1]
    unseen = lse == float("-inf")
    weight = (lse.detach() - rows_lse.masked_fill(unseen, 0.0)).exp()  # 0 where nothing was seen
    change = (grad_out * (out.detach() - rows_out)).sum(dim=-1).transpose(1, 2)
    found = torch.autograd.grad(
        (out, lse),
        inputs,
        ((grad_out * weight.transpose(1, 2).unsqueeze(-1)).to(out.dtype), weight * (change + grad_lse)),
        allow_unused=True,
    )
    slices = (slice(r0, r1), slice(k0, k1), slice(k0, k1))
    for total, grad, rows in zip(totals, found, slices, strict=True):
        if grad is not None:
            total[b0:b1, rows] += grad
