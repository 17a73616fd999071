"""The ring's backward: every step is computed anew, and the gradient of keys travels behind them, home at last.

Training therefore holds no more keys than inference does. All keys go all the way round, seen or not: a gradient's way
home is then the ring's own last step. The gradient of one step's keys is on its way while the next step is computed;
only the way home is waited for with nothing to do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.distributed.chunks import Chunks, RingPlan, unpacked
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
    upstream = grad_out.to(sums), grad_lse
    chunks = Chunks(plan, peers, k, v)
    travelling = Travelling(plan, peers)
    for step, parts in enumerate(plan.parts):
        on_the_way = chunks.pass_on(step)
        keys, values = chunks.held(step)
        grads, chunk = (grad_k, grad_v), None
        if step:
            chunk = k.new_zeros(keys.shape[1], k.shape[0], chunks.heads * sum(chunks.widths), dtype=sums)
            grads = unpacked(chunk, chunks.heads, chunks.widths)
        for part in parts:
            _add(call, part, (q, keys, values), (out, lse), upstream, (grad_q, *grads))
        finish(on_the_way)
        if chunk is not None:
            travelling.pass_on(step, chunk)
    home = travelling.arrived()
    if home is not None:
        rows = slice(plan.lead, plan.lead + plan.sizes[plan.place])
        for grad, back in zip((grad_k, grad_v), unpacked(home, chunks.heads, chunks.widths), strict=True):
            grad[:, rows] += back
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


class Travelling:
    """Gradients that go round behind their keys: on their way while the next step is computed, and then added to."""

    def __init__(self, plan: RingPlan, peers: Peers) -> None:
        self.plan, self.peers = plan, peers
        self._works: list[Any] = []
        self._leaving: torch.Tensor | None = None
        self._arriving: torch.Tensor | None = None

    def pass_on(self, step: int, mine: torch.Tensor) -> None:
        """Start sending this step's gradient, with what the places before say of it; the next step's is on its way."""
        plan, peers = self.plan, self.peers
        before = self.arrived()
        if before is not None:
            mine += before
        self._leaving = mine
        self._arriving = mine.new_empty(plan.sizes[plan.origin(step + 1)], *mine.shape[1:])
        self._works = start([*peers.send(mine, plan.after), *peers.receive(self._arriving, plan.before)])

    def arrived(self) -> torch.Tensor | None:
        """What has come meanwhile, of the keys of the step that is done now; at last of this place's own."""
        finish(self._works)
        self._works, self._leaving = [], None
        return self._arriving


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
    outputs, gradients_of_outputs = [out], [(grad_out * weight.transpose(1, 2).unsqueeze(-1)).to(out.dtype)]
    if lse.requires_grad:  # that of a call without samples hangs on nothing
        outputs.append(lse)
        gradients_of_outputs.append(weight * (change + grad_lse))
    found = torch.autograd.grad(outputs, inputs, gradients_of_outputs, allow_unused=True)
    slices = (slice(r0, r1), slice(k0, k1), slice(k0, k1))
    for total, grad, rows in zip(totals, found, slices, strict=True):
        if grad is not None:
            total[b0:b1, rows] += grad
