"""`pa.warmup`: plan, load, compile and autotune before a graph capture or the first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from polyattn.call import attention
from polyattn.door.request import Request, TensorFacts
from polyattn.layer import Attention
from polyattn.sample import sample_structure
from polyattn.structures import Structure


def warmup(model_or_requests: torch.nn.Module | Request | Iterable[Request]) -> int:
    """Make the calls that requests describe, on tensors of zeros, so that later ones find everything ready.

    From a model it takes the request that each of its layers made last (`layer.last_route`) and makes it anew through
    that layer, with the layer's choices: run one forward, then warm up. A structure is made up where the request has
    one, since requests hold no content. Returns how many calls were made.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> pa.warmup(pa.explain(q, q, q).request)
    1
    """
    if isinstance(model_or_requests, torch.nn.Module):
        return _warm_layers(model_or_requests)
    if not isinstance(model_or_requests, Iterable | Request):
        raise TypeError(f"warmup: a module or requests are needed, got {type(model_or_requests).__name__}")
    requests = [model_or_requests] if isinstance(model_or_requests, Request) else list(model_or_requests)
    for request in requests:
        if not isinstance(request, Request):
            raise TypeError(f"warmup: a module or polyattn.vendor.Request is needed, got {type(request).__name__}")
    distinct = list(dict.fromkeys(requests))
    for request in distinct:
        _call(request)
    return len(distinct)


def _warm_layers(model: torch.nn.Module) -> int:
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    ran = [(layer, layer.last_route.request) for layer in layers if layer.last_route is not None]
    if layers and not ran:
        raise ValueError("warmup: no attention layer of this model has run yet; run one forward, or give requests")
    for layer, request in ran:
        q, k, v = _tensors(request)
        with torch.set_grad_enabled(request.grad), _autocast(request):
            result = layer(q, k, v, _structure(request), gate=_gate(request), return_lse=request.lse)
            _backward(request, result)
    return len(ran)


def _call(request: Request) -> None:
    q, k, v = _tensors(request)
    scale = None if request.scale == request.head_dim**-0.5 else request.scale  # as the call that is to come writes it
    with torch.set_grad_enabled(request.grad), _autocast(request):
        result = attention(
            q, k, v, structure=_structure(request), gate=_gate(request), causal=request.causal, window=request.window,
            softcap=request.softcap, scale=scale, return_lse=request.lse, quant=request.quant,
            deterministic=request.deterministic, options=request.options,
        )  # fmt: skip
        _backward(request, result)


def _structure(request: Request) -> Structure | None:
    return sample_structure(request, torch.device(request.device))


def _gate(request: Request) -> torch.Tensor | None:
    """A gate where the call to come has one."""
    video = request.structure_facts.video
    if video is None or not video.gate:
        return None
    shape = (*request.q.shape[:-1], request.v.shape[-1])
    gate = torch.zeros(shape, dtype=getattr(torch, request.q.dtype), device=request.device)
    return gate.requires_grad_(video.gate_grad)


def _autocast(request: Request) -> torch.autocast:
    dtype = None if request.autocast_dtype is None else getattr(torch, request.autocast_dtype)
    return torch.autocast(request.device_type, dtype=dtype, enabled=dtype is not None)


def _tensors(request: Request) -> list[torch.Tensor]:
    return [_zeros(facts, request) for facts in (request.q, request.k, request.v)]


def _zeros(facts: TensorFacts, request: Request) -> torch.Tensor:
    """Zeros of this shape and these strides: a plan is found by both."""
    room = 1 + sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=True) if size > 0)
    storage = torch.zeros(room, dtype=getattr(torch, facts.dtype), device=request.device)
    return storage.as_strided(facts.shape, facts.stride).requires_grad_(request.grad)


def _backward(request: Request, result: Any) -> None:
    if request.grad:
        output = result[0] if request.lse else result
        output.sum().backward()
