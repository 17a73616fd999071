"""`pa.warmup`: plan, load, compile and autotune before a graph capture or the first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from polyattn.call import attention
from polyattn.door.request import Request, TensorFacts
from polyattn.errors import UnsupportedRequest
from polyattn.layer import Attention


def warmup(model_or_requests: torch.nn.Module | Request | Iterable[Request]) -> int:
    """Make the calls that requests describe, on empty-valued tensors, so that later ones find everything ready.

    From a model it takes the requests that its layers have made so far (`layer.last_route`): run one forward, then
    warm up. Only requests whose structure is dense are made anew; others need their structure and are planned at their
    first call. Returns how many calls were made.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> pa.warmup(pa.explain(q, q, q).request)
    1
    """
    requests = list(_requests(model_or_requests))
    made = 0
    for request in dict.fromkeys(requests):
        if request.structure_kind == "dense":
            _call(request)
            made += 1
    return made


def _requests(source: Any) -> Iterable[Request]:
    if isinstance(source, Request):
        return [source]
    if isinstance(source, torch.nn.Module):
        layers = [module for module in source.modules() if isinstance(module, Attention)]
        if layers and all(layer.last_route is None for layer in layers):
            raise ValueError(
                "warmup: no attention layer of this model has run yet; run one forward first, or give requests"
            )
        return [layer.last_route.request for layer in layers if layer.last_route is not None]
    items = list(source)
    for item in items:
        if not isinstance(item, Request):
            raise TypeError(
                f"warmup: a module or polyattn.vendor.Request objects are needed, got {type(item).__name__}"
            )
    return items


def _call(request: Request) -> None:
    if request.quant is not None:
        raise UnsupportedRequest(f"warmup: a quantised request ({request.quant}) is planned at its first call")
    q, k, v = (_tensor(facts, request.device) for facts in (request.q, request.k, request.v))
    with torch.set_grad_enabled(request.grad):
        if request.grad:
            for tensor in (q, k, v):
                tensor.requires_grad_()
        result = attention(
            q, k, v, causal=request.causal, window=request.window, softcap=request.softcap, scale=request.scale,
            return_lse=request.lse, deterministic=request.deterministic, options=request.options,
        )  # fmt: skip
        if request.grad:
            output = result[0] if request.lse else result
            output.sum().backward()


def _tensor(facts: TensorFacts, device: str) -> torch.Tensor:
    return torch.zeros(facts.shape, dtype=getattr(torch, facts.dtype), device=device).as_strided(
        facts.shape, _row_major(facts)
    )


def _row_major(facts: TensorFacts) -> tuple[int, ...]:
    return TensorFacts.contiguous(facts.shape, facts.dtype).stride
