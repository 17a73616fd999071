"""The call over several ranks: found again by its facts, agreed upon by the ranks on first use, then run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.arguments import Arguments, check_combination, check_flag, check_gate, checked
from polyattn.call import check_heads
from polyattn.distributed.agreement import agree
from polyattn.distributed.attend import attend
from polyattn.distributed.failure import Communicating
from polyattn.distributed.geometry import Asked, Geometry, sees_alike, splits_of
from polyattn.distributed.groups import Ranks, ranks_of
from polyattn.distributed.lanes import Lanes, lane_like, lanes_of
from polyattn.distributed.local import LocalCall
from polyattn.distributed.parallel import SequenceParallel
from polyattn.distributed.planning import planned
from polyattn.distributed.refusal import tell_everyone
from polyattn.distributed.rehearsal import rehearse
from polyattn.distributed.signature import signature_of
from polyattn.request import autocast_dtype, check_tensors, check_types
from polyattn.scope import choices_here, step_here
from polyattn.structures import Dense, Structure
from polyattn.structures.base import keep
from polyattn.structures.host_data import dtype_name

#: Agreed calls that one structure remembers.
_LIMIT = 256
#: Stands for calls without a structure: what they derive is kept here.
_DENSE = Dense()


def attend_over_ranks(
    call: LocalCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    structure: Structure | None,
    causal: bool,
    window: Any,
    gate: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
    parallel: SequenceParallel,
    joint: Any,
    replicated: Any,
) -> Any:
    """`pa.attention` with `parallel` of several ranks: the answer for the rows that this rank holds.

    Whatever is wrong is said on every rank, before anything is communicated.
    """
    complete = getattr(replicated, "kv", False) is True
    try:
        facts = checked(causal, window, call.softcap, call.deterministic, call.options)
        check_flag("return_lse", return_lse)
        check_types(q, k, v)
        if call.heads is not None:
            check_heads(q, k, call.heads)
        lanes = held(q, k, v, gate, structure, joint, replicated)
        check_combination(structure, facts.causal, facts.window, facts.softcap, return_lse, gate)
        grad = _requires_grad(lanes)
        wants_grad = any(map(any, grad))
        if out is not None:
            _check_out(out, lanes, q.dim(), wants_grad)
        alone = complete and sees_alike(structure, facts.causal, facts.window)  # it does not matter which rank this is
        ranks = None if alone else ranks_of(parallel)
        asked = asked_of(lanes, facts, parallel, complete, ranks)
        ranks = None if complete else ranks
        stated = _stated(call, lanes, ranks, facts, return_lse, grad)
        cache = (_DENSE if structure is None else structure).parts
        known = cache.get((asked, *stated.values()))
        geometry = _prepared(call, asked, lanes, structure, facts, return_lse, wants_grad) if known is None else known
    except Exception as problem:  # whatever it is, the others would wait for this rank
        if not complete:
            tell_everyone(parallel, problem)
        raise
    if known is None:
        if ranks is not None:
            signature = signature_of(parallel, splits_of(asked, structure), stated, structure)
            agree(ranks.group, {**signature, "shared out": geometry.told})
            ranks.meet(q.device)
        keep(cache, _LIMIT, (asked, *stated.values()), geometry)
    run = partial(attend, geometry, ranks, call, lanes, structure, facts.causal, facts.window, return_lse, wants_grad)
    if ranks is None:
        result, lse = run()
    else:
        with Communicating(ranks.group, Told(parallel.degrees, lanes)):
            result, lse = run()
    if q.dim() == 3:
        result, lse = result.squeeze(0), None if lse is None else lse.squeeze(0)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


class Told:
    """A call for a reader of an error; text only then."""

    __slots__ = ("degrees", "lanes")

    def __init__(self, degrees: str, lanes: Lanes) -> None:
        self.degrees, self.lanes = degrees, lanes

    def __str__(self) -> str:
        q, k = (f"{list(lane.shard.shape)} of {lane.rows} rows here" for lane in (self.lanes.q, self.lanes.k))
        return f"attention over {self.degrees}: q {dtype_name(self.lanes.q.shard.dtype)} {q}, k {k}"


def held(q: Any, k: Any, v: Any, gate: Any, structure: Structure | None, joint: Any, replicated: Any) -> Lanes:
    """What this rank holds, in the dtype that autocast imposes; the errors of `pa.attention` where it does not fit."""
    dtype = autocast_dtype(q, k, v)
    check_tensors(q, k, v, structure, dtype is not None)
    lanes = lanes_of(q, k, v, joint=joint, replicated=replicated)
    if gate is not None:
        check_combination(structure, False, None, 0.0, False, gate)  # before the gate's shape: who takes none says so
        check_gate(gate, (q.shape[0], lanes[0].rows, q.shape[-2], v.shape[-1]))
        if dtype is None and gate.dtype != q.dtype:
            raise TypeError(f"gate: q's dtype {dtype_name(q.dtype)} is needed, got {dtype_name(gate.dtype)}")
    found = Lanes(*lanes, None if gate is None else lane_like(gate, lanes[0]))
    return found if dtype is None else found.to(dtype)


def _requires_grad(lanes: Lanes) -> tuple[tuple[bool, bool], ...]:
    """Of q, k, v and the gate: (whether the shard wants a gradient, whether rows beside it do).

    Told apart, because a backward pass exchanges gradients of shards only where a shard wants one.
    """
    enabled = torch.is_grad_enabled()
    return tuple(
        (
            enabled and lane.shard.requires_grad,
            enabled and any(tensor.requires_grad for tensor in (*lane.before, *lane.after)),
        )
        for lane in lanes.all()
    )


def _check_out(out: torch.Tensor, lanes: Lanes, rank: int, wants_grad: bool) -> None:
    shard = lanes.q.shard
    want = (shard.shape[0], lanes.q.rows, shard.shape[2], lanes.v.shard.shape[-1])[4 - rank :]
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: a tensor is needed, got {type(out).__name__}")
    if tuple(out.shape) != want or out.dtype != shard.dtype or out.device != shard.device:
        raise ValueError(
            f"out: {list(want)} {dtype_name(shard.dtype)} on {shard.device} is needed, "
            f"got {list(out.shape)} {dtype_name(out.dtype)} on {out.device}"
        )
    if wants_grad or out.requires_grad:
        raise ValueError("out: gradients do not flow into a given buffer; call without out= or under torch.no_grad()")


def asked_of(lanes: Lanes, facts: Arguments, parallel: SequenceParallel, complete: bool, ranks: Ranks | None) -> Asked:
    """The facts that decide a rank's geometry; the first rank's where there is no group."""
    q, k, v = lanes.q.shard, lanes.k.shard, lanes.v.shard
    rank, per_host = (0, parallel.world_size) if ranks is None else (ranks.rank, ranks.per_host)
    return Asked(
        parallel, rank, lanes.q.counts, lanes.k.counts, (q.shape[2], k.shape[2]), complete, facts.causal, facts.window,
        q.shape[0], (q.shape[3], v.shape[3]), q.element_size(), per_host,
    )  # fmt: skip


def _stated(
    call: LocalCall, lanes: Lanes, ranks: Ranks | None, facts: Arguments, lse: bool, grad: tuple[tuple[bool, bool], ...]
) -> dict[str, Any]:
    """What beside rows makes this call another one, by name: what the ranks have to agree on."""
    q, v = lanes.q.shard, lanes.v.shard
    return {
        "group": None if ranks is None else ranks.number,
        "device": q.device,
        "batch": q.shape[0],
        "heads": (q.shape[2], lanes.k.shard.shape[2]),
        "widths": (q.shape[3], v.shape[3]),
        "dtype": q.dtype,
        "lse": lse,
        "gradients (shard, rows beside it)": grad,
        "arguments": (facts, *call.stated),
        "backend around": choices_here.get(),
        "step": None if call.quant is None else step_here(),
    }


def _prepared(
    call: LocalCall,
    asked: Asked,
    lanes: Lanes,
    structure: Structure | None,
    facts: Arguments,
    lse: bool,
    grad: bool,
) -> Geometry:
    """This rank's plan on first use: checked against the glued sequence, and every ordinary call of it has a route."""
    like = lanes.q.shard, lanes.v.shard

    def check(geometry: Geometry) -> None:
        _check_structure(structure, geometry, asked, like[0])
        if not asked.complete:
            rehearse(geometry, call, like, asked.rank, facts, lse, grad, lanes.gate is not None)

    return planned(asked, structure, (_DENSE if structure is None else structure).parts, check)


def _check_structure(structure: Structure | None, geometry: Geometry, asked: Asked, like: torch.Tensor) -> None:
    """The structure against the glued sequence, which no rank holds whole."""
    if structure is None or geometry.spread is None:
        return
    batch = () if structure.kind == "packed" else (like.shape[0],)
    q, k = geometry.spread.q.total, geometry.spread.k.total
    structure.check((*batch, q, asked.heads[0], like.shape[-1]), (*batch, k, asked.heads[1], like.shape[-1]))
