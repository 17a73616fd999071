"""A plan: everything about a call that its shapes, strides, dtypes and arguments decide, worked out once.

`make_plan` validates, routes and returns a `Plan` whose `run` does the rest of the call; `pa.attention` memoises plans.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from polyattn.arguments import Arguments, check_combination, checked_scale
from polyattn.choice import Choice
from polyattn.discovery import all_backend_names, backends_of, platform_for
from polyattn.door.platform import Platform
from polyattn.door.request import Request
from polyattn.environment import log, on_reload, warn
from polyattn.machine import machine_of
from polyattn.quant import Quant
from polyattn.request import autocast_dtype, check_out, check_tensors, check_types, request_of, shares_memory
from polyattn.routing import Route, find_route
from polyattn.structures import Structure
from polyattn.unowned import platform_of_unowned
from polyattn.whole_video import as_it_is, over_tokens, stands_in

Result = tuple[torch.Tensor, torch.Tensor | None]
SlotCall = Callable[..., Result]
Runner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Structure | None], Any]


@dataclass(frozen=True)
class Plan:
    """A route and the closure that runs a call of this shape along it, returning what the caller asked for."""

    route: Route
    run: Runner


def profiled(plan: Plan) -> Plan:
    """The plan, whose calls are a range of the route's name in the profiler that is running."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, structure: Any) -> Any:
        with torch.autograd.profiler.record_function(plan.route.name):
            return plan.run(q, k, v, out, structure)

    return Plan(plan.route, run)


def make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    structure: Structure | None,
    arguments: Arguments,
    *,
    scale: float | None,
    lse: bool,
    out: torch.Tensor | None,
    choices: tuple[Choice, ...],
    quant: Quant | None,
    notes: tuple[str, ...] = (),
    compiling: bool = False,
) -> Plan:
    """Validate the call, find its route, and bind everything but the tensors."""
    request, platform, autocast = describe(
        q, k, v, structure, arguments, scale=scale, lse=lse, out=out, quant=quant, compiling=compiling
    )
    machine = machine_of(platform, request.device)
    backends = backends_of(platform)
    route = find_route(request, machine, platform, backends, choices, all_backend_names, notes)
    request = route.request  # a dense one, where that stands in for video tiles that nobody takes
    squeeze = request.structure_kind == "packed" and q.dim() == 4
    if _is_empty(request):
        return Plan(route, partial(_run_empty, lse=lse, squeeze=squeeze, autocast=autocast))
    _tell(route)
    apart = out is None or not shares_memory(out, q, k, v)
    return Plan(
        route,
        _runner(route, request, platform, quant, q.shape[1], squeeze=squeeze, autocast=autocast, apart=apart),
    )


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    structure: Structure | None,
    arguments: Arguments,
    *,
    scale: float | None,
    lse: bool,
    out: torch.Tensor | None,
    quant: Quant | None,
    compiling: bool = False,
) -> tuple[Request, Platform, torch.dtype | None]:
    """The request of a validated call, the platform that owns it, and the dtype autocast casts it to."""
    check_types(q, k, v)
    autocast = autocast_dtype(q, k, v)
    check_tensors(q, k, v, structure, autocast is not None)
    check_combination(structure, arguments.causal, arguments.window, arguments.softcap, lse, None)
    platform = owner_of(q.device.type)
    capturing = platform.capturing is not None and platform.capturing()
    request = request_of(
        q, k, v, structure, arguments,
        scale=checked_scale(scale, q.shape[-1]), lse=lse, out=out, autocast=autocast,
        quant=None if quant is None else quant.method, capturing=capturing, compiling=compiling,
    )  # fmt: skip
    if out is not None:
        check_out(out, q, k, v, autocast or q.dtype, request.grad)
    if structure is not None:
        squeeze = structure.kind == "packed" and q.dim() == 4
        structure.check(*((t.shape[1:] if squeeze else t.shape) for t in (q, k)))
    return request, platform, autocast


#: Kept in plain dictionaries, as many entries as device types and slots: Dynamo warns of lru_cache where it passes by.
_owners: dict[str, Platform] = {}
_calls: dict[str, Callable[..., Any]] = {}


def owner_of(device_type: str) -> Platform:
    """The platform that serves a device type; the generic one where nobody owns it."""
    if device_type not in _owners:
        _owners[device_type] = platform_for(device_type) or platform_of_unowned(device_type)
    return _owners[device_type]


def load_call(reference: str) -> Callable[..., Any]:
    """Import "module:function"."""
    if reference not in _calls:
        module, _, name = reference.partition(":")
        _calls[reference] = getattr(importlib.import_module(module), name)
    return _calls[reference]


def forward_of(route: Route) -> SlotCall:
    """The slot's function, wrapped in the route's compositions, called like a slot."""
    call = load_call(route.slot.call)
    for composition, request in zip(reversed(route.compositions), reversed(route.lowered), strict=True):
        call = load_call(composition.bind)(call, request)
    return call


def _runner(
    route: Route,
    request: Request,
    platform: Platform,
    quant: Quant | None,
    rows: int,
    *,
    squeeze: bool,
    autocast: torch.dtype | None,
    apart: bool,
) -> Runner:
    """The rest of a call of q's axis 1 = `rows`; `apart`: the caller's buffer shares no memory with the inputs."""
    options = (
        *(option for option in request.options if option.platform == platform.name),
        *([quant] if quant else ()),
    )
    forward = _bound(route, request, options) or partial(
        forward_of(route),
        causal=request.causal,
        scale=request.scale,
        window=request.window,
        softcap=request.softcap,
        need_lse=request.lse,
        options=options,
    )
    structured = request.structure_kind != "dense"
    if stands_in(request) and not as_it_is(request, rows):
        forward, structured = over_tokens(forward, request), True
    writes_out = not request.out or (apart and (not route.native or route.slot.features.out))  # compositions write
    plain = not squeeze and autocast is None and writes_out and not request.capturing
    if plain and not structured:
        return _dense_with_lse(forward) if request.lse else _dense(forward)
    if plain:
        return _structured_with_lse(forward) if request.lse else _structured(forward)
    return partial(_run_adapted, forward, request, structured, squeeze, autocast, writes_out)


def _bound(route: Route, request: Request, options: tuple[Any, ...]) -> SlotCall | None:
    """The slot with the request's facts already in it, where it takes the request as it is and can do that."""
    if not route.native or not route.slot.bind:
        return None
    bound: SlotCall | None = load_call(route.slot.bind)(request, options)
    return bound


def _dense(forward: SlotCall) -> Runner:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, _: Structure | None) -> Any:
        return forward(q, k, v, out, meta=None)[0]

    return run


def _dense_with_lse(forward: SlotCall) -> Runner:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, _: Structure | None) -> Any:
        return forward(q, k, v, out, meta=None)

    return run


def _structured(forward: SlotCall) -> Runner:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, structure: Any) -> Any:
        return forward(q, k, v, out, meta=structure.bind(q.device, q.shape, k.shape))[0]

    return run


def _structured_with_lse(forward: SlotCall) -> Runner:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, structure: Any) -> Any:
        return forward(q, k, v, out, meta=structure.bind(q.device, q.shape, k.shape))

    return run


def _run_adapted(
    forward: SlotCall,
    request: Request,
    structured: bool,
    squeeze: bool,
    autocast: torch.dtype | None,
    writes_out: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    structure: Structure | None,
) -> Any:
    """A call whose tensors need a cast, a squeeze, or a copy into the caller's buffer."""
    buffer = out
    if squeeze:
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
        out = None if out is None else out.squeeze(0)
    meta = None
    if structure is not None and structured:
        meta = structure.bind(q.device, q.shape, k.shape, request.capturing)
    if autocast is not None:
        q, k, v = q.to(autocast), k.to(autocast), v.to(autocast)
        with torch.autocast(q.device.type, enabled=False):
            result, lse = forward(q, k, v, out if writes_out else None, meta=meta)
    else:
        result, lse = forward(q, k, v, out if writes_out else None, meta=meta)
    if buffer is not None:
        if not writes_out:
            assert out is not None
            out.copy_(result)
        result = buffer
    elif squeeze:
        result = result.unsqueeze(0)
    if not request.lse:
        return result
    assert lse is not None
    return result, lse.unsqueeze(0) if squeeze else lse


def _is_empty(request: Request) -> bool:
    """No query rows, or not one key in all: nothing for a kernel to do."""
    rows = 1
    for size in request.q.shape[:-1]:
        rows *= size
    keys = request.k.shape[0] * request.k.shape[1] if request.structure_kind == "paged" else request.k.shape[-3]
    return rows == 0 or keys == 0


def _run_empty(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    structure: Structure | None,
    *,
    lse: bool,
    squeeze: bool,
    autocast: torch.dtype | None,
) -> Any:
    empty = load_call("polyattn.backends.empty:empty_attention")
    if autocast is not None:
        q, k, v = q.to(autocast), k.to(autocast), v.to(autocast)
    if squeeze:
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    if structure is not None:
        structure.bind(q.device, q.shape, k.shape)
    result, row_lse = empty(q, k, v, lse)
    if squeeze:
        result, row_lse = result.unsqueeze(0), None if row_lse is None else row_lse.unsqueeze(0)
    if out is not None:
        result = out.copy_(result)
    return (result, row_lse) if lse else result


def _tell(route: Route) -> None:
    """A new route in the log; a slow one as a warning, once for each that there is."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s takes [%s]", route.name, route.request)
    if route.slow:
        against = "; ".join(route.reasons.get(route.backend.name, ()))
        warn(
            f"{route.name}, a generic route, serves [{route.request}]: exact, but slower than a slot that takes it. "
            f"{route.backend.name} does not: {against}. pa.explain(...) has the other backends' reasons",
            key=("slow", route.platform, route.name, route.request.structure_kind),
        )


@on_reload
def _forget() -> None:
    _owners.clear()
