"""`pa.attention` inside a compiled graph: one opaque operator that makes the eager call when the graph runs.

The graph depends on shapes, dtypes, the structure's kind and the call's arguments only. A structure enters as the
tensors that stand for it; when the graph runs, the operator finds the living structure by its tensor, so that all it
knows on the host, and all it has prepared, is there again. The backward is an operator too and makes the call anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from polyattn import structures
from polyattn.arguments import check_combination, check_flag, checked, checked_scale
from polyattn.distributed.parallel import over_ranks
from polyattn.errors import UnsupportedRequest
from polyattn.operators import define_once
from polyattn.quant import Quant, as_quant, skipped
from polyattn.recorders import here, recorders
from polyattn.request import autocast_dtype, check_out, check_tensors
from polyattn.scope import choices_here, logs_here, traced_choice, traced_step
from polyattn.structures.anchors import living
from polyattn.structures.base import Structure
from polyattn.structures.host_data import on_host
from polyattn.structures.video_gate import fitting_gate, gated

_KINDS: dict[str, type[Structure]] = {
    cls.kind: cls
    for cls in (
        structures.Dense,
        structures.KeyPadding,
        structures.Mask,
        structures.Packed,
        structures.Spans,
        structures.Paged,
        structures.VideoTiles,
        structures.BlockMap,
    )
}
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? s0, Tensor? s1, Tensor? s2, Tensor? s3, Tensor? handle, SymInt i0, "
    "SymInt i1, SymInt left, SymInt right, float scale, float softcap, str facts"
)


def attend_traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    structure: Structure | None,
    causal: bool,
    scale: float | None,
    window: Any,
    softcap: float,
    gate: Any,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str | None,
    configured: str | None,
    quant: Any,
    layer: int | None,
    deterministic: bool,
    options: Any,
    parallel: Any,
    joint: Any,
    replicated: Any,
) -> Any:
    """The traced form of `pa.attention`; arguments as there."""
    if over_ranks(parallel):
        from polyattn.distributed.uncompiled import attend_between_graphs

        return attend_between_graphs(
            (scale, softcap, backend, configured, quant, layer, deterministic, options), q, k, v, structure=structure,
            causal=causal, window=window, gate=gate, return_lse=return_lse, out=out, parallel=parallel, joint=joint,
            replicated=replicated,
        )  # fmt: skip
    for name, value in (("parallel", parallel), ("joint", joint), ("replicated", replicated)):
        if value is not None:
            raise UnsupportedRequest(f"{name}= is not supported inside a compiled graph; make this call outside of it")
    if options:
        raise UnsupportedRequest("options= are not supported inside a compiled graph; make this call outside of it")
    arguments = checked(causal, window, softcap, deterministic, ())
    check_flag("return_lse", return_lse)
    check_combination(structure, arguments.causal, arguments.window, arguments.softcap, return_lse, gate)
    if gate is not None:
        gate = fitting_gate(structure, gate, q, k, v)
    dtype = autocast_dtype(q, k, v)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    check_tensors(q, k, v, structure, False)
    asked = as_quant(quant)
    if asked is not None and skipped(asked, layer, traced_step()) is not None:
        asked = None
    anchors: tuple[torch.Tensor, ...] = ()
    ints: tuple[int, ...] = ()
    kind = detail = ""
    handle = None
    if structure is not None:
        if structure.kind not in _KINDS:
            raise UnsupportedRequest(f"{type(structure).__name__} is not supported inside a compiled graph")
        anchors, ints = structure.anchors(), structure.anchor_ints()
        kind, detail = structure.kind, structure.anchor_detail()
        # a mask that wants a gradient is the tensor in the graph, not the one that the living structure holds
        handle = None if structure.facts.mask_grad else structure.handle
    if kind == "video_tiles":  # its tensors follow from numbers; the gate has the place of a mask that wants a gradient
        if handle is None:
            raise UnsupportedRequest("VideoTiles cannot be built inside a compiled graph; build it outside")
        anchors = () if gate is None else (gate,)
    s0, s1, s2, s3 = (*anchors, None, None, None, None)[:4]
    i0, i1 = (*ints, 0, 0)[:2]
    window_ = arguments.window
    left, right = (-1, -1) if window_ is None else (-1 if side is None else side for side in window_)
    inside, around = traced_choice()
    scale_ = checked_scale(scale, q.shape[-1])
    method, rotate = (None, True) if asked is None else (asked.method, asked.rotate)
    facts = _BREAK.join(
        (
            kind, detail, _flag(causal), _flag(return_lse), _stated(backend), _stated(inside), _stated(around),
            _stated(configured), method or "", _flag(rotate), _flag(deterministic),
        )
    )  # fmt: skip
    inputs = (q, k, v, s0, s1, s2, s3, handle, i0, i1, left, right, scale_, float(softcap), facts)
    lse = None
    if return_lse or _wants_grad(q, k, v, *anchors):
        result, lse = torch.ops.polyattn.attention(*inputs)
    else:
        result = torch.ops.polyattn.inference(*inputs)
    if out is not None:
        needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
        check_out(out, q, k, v, q.dtype, needs_grad and torch.is_grad_enabled())
        result = out.copy_(result)
    return (result, lse) if return_lse else result


class _Facts(NamedTuple):
    """What is constant in a graph: the operator takes it as one text, since each argument costs on every call."""

    kind: str
    detail: str
    causal: bool
    lse: bool
    argument: str | None
    inside: str | None
    configured: str | None
    quant: Quant | None
    deterministic: bool


_BREAK = "\x1e"  # a blank to str.strip, and in no name


def _flag(value: bool) -> str:
    return "1" if value else ""


def _stated(choice: str | None) -> str:
    """A choice as part of the text; an empty one, which permits everything, is not the same as none."""
    return "" if choice is None else f"={choice.replace(_BREAK, ' ')}"


def _choice(text: str) -> str | None:
    return text[1:] if text else None


@lru_cache(maxsize=1024)
def _facts(text: str) -> _Facts:
    # a scope around the graph is read when the graph runs; that it is in the text makes Dynamo guard it
    kind, detail, causal, lse, argument, inside, _, configured, method, rotate, deterministic = text.split(_BREAK)
    return _Facts(
        kind, detail, bool(causal), bool(lse), _choice(argument), _choice(inside), _choice(configured),
        Quant(method, bool(rotate)) if method else None, bool(deterministic),
    )  # fmt: skip


def _wants_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _call(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager call behind the operators of two tensors."""
    answer = _answer(q, k, v, *rest)
    return answer if _facts(rest[-1]).lse else (answer, q.new_empty(0, dtype=torch.float32))


def _answer(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """The eager call behind the operators: the output, or the output and the LSE."""
    from polyattn.call import find_plan

    s0, s1, s2, s3, handle, i0, i1, left, right, scale, softcap, text = rest
    facts = _facts(text)
    structure = None
    if facts.kind:
        anchors = tuple(t for t in (s0, s1, s2, s3) if t is not None)
        structure = _structure(facts.kind, facts.detail, handle, anchors, (i0, i1))
        if facts.kind == "video_tiles" and anchors:
            structure = gated(structure, anchors[0], q, k, v)
    if recorders and (recorder := here()) is not None:
        recorder.compiled(structure)
    window = None if left == right == -1 else (None if left < 0 else left, None if right < 0 else right)
    token = None if facts.inside is None else choices_here.set((*choices_here.get(), facts.inside))
    try:
        plan = find_plan(
            q, k, v, structure, facts.causal, scale, window, softcap, facts.lse, None, facts.argument,
            facts.configured, facts.quant, None, facts.deterministic, (), None, True,
        )  # fmt: skip
        return plan.run(q, k, v, None, structure)
    finally:
        if token is not None:
            choices_here.reset(token)


def _structure(
    kind: str, detail: str, handle: torch.Tensor | None, anchors: tuple[torch.Tensor, ...], ints: tuple[int, ...]
) -> Structure:
    if kind == "video_tiles":
        tiles = living(handle)
        if tiles is None:
            raise RuntimeError("a compiled graph's VideoTiles no longer exists: keep it as long as the graph runs")
        return tiles
    if not anchors:
        return _KINDS[kind]()
    return living(handle) or _KINDS[kind].from_anchors(anchors, ints, detail)


def _run(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        result, lse = _call(q, k, v, *rest)
    return result.contiguous(), lse.contiguous()


def _infer(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
    """The output alone, for a graph without gradients: they need not be turned off, and a second tensor costs."""
    result: torch.Tensor = _answer(q, k, v, *rest)
    return result.contiguous()


def _fake_inference(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
    result: torch.Tensor = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return result


def _fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not _facts(rest[-1]).lse:
        return result, q.new_empty(0, dtype=torch.float32)
    return result, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)


def _held(handle: Any) -> Structure | None:
    """The living structure, where the handle can be read: not while a compiler traces with tensors of its own kind."""
    return living(handle) if type(handle) is torch.Tensor and on_host(handle) else None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.rest = inputs[8:]
    ctx.structure = _held(inputs[7])  # a temporary structure must last until its backward
    ctx.set_materialize_grads(True)


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, *structure = ctx.saved_tensors
    dq, dk, dv, ds = torch.ops.polyattn.attention_backward(grad, grad_lse, q, k, v, *structure, *ctx.rest)
    wants_mask = structure[0] is not None and ctx.needs_input_grad[3]
    return (dq, dk, dv, ds if wants_mask else None, *([None] * (len(ctx.rest) + 4)))


def _run_backward(grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    wants_mask = rest[0] is not None and rest[0].dtype.is_floating_point
    silent = logs_here.set(())  # the forward was counted
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (q, k, v, *(rest[:1] if wants_mask else ()))]
        tail = (inputs[3], *rest[1:]) if wants_mask else rest
        result, lse = _call(*inputs[:3], *tail)
        outputs, grads = ([result, lse], [grad, grad_lse]) if _facts(rest[-1]).lse else ([result], [grad])
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        logs_here.reset(silent)
        found = torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]
    return tuple(g.contiguous() for g in (*filled, *([] if wants_mask else [q.new_empty(0)])))


def _fake_backward(grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    wants_mask = rest[0] is not None and rest[0].dtype.is_floating_point
    grads = [t.new_empty(t.shape) for t in (q, k, v)]
    return (*grads, rest[0].new_empty(rest[0].shape) if wants_mask else q.new_empty(0))


define_once("polyattn::inference", f"({_ARGUMENTS}) -> Tensor", _infer, _fake_inference)
define_once(
    "polyattn::attention",
    f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    _run,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)
define_once(
    "polyattn::attention_backward",
    f"(Tensor grad, Tensor grad_lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
