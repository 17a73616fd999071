"""Requests and features to lower with, and a composition run as a route runs it."""

from __future__ import annotations

import importlib

import torch

from polyattn import structures
from polyattn.compositions import COMPOSITIONS
from polyattn.reference import reference_attention
from polyattn.vendor import Features, Request
from tests.unit.compositions.inners import CALL, facts_of

NAMED = {composition.name: composition for composition in COMPOSITIONS}
FLOATS = frozenset({"float16", "float32", "float64"})


def features(*kinds, **has):
    every = {"causal": True, "window": True, "softcap": True, "lse": True, "gqa": True, "v_dim": True}
    return Features(kinds=frozenset(kinds), dtypes=FLOATS, **{**every, **has})


def request_for(q, k, v, structure=None, **fields):
    kind = "dense" if structure is None else structure.kind
    if structure is not None and kind == "mask" and structure.additive:
        kind = "bias"
    if structure is not None and kind == "key_padding" and structure.facts.common_prefix is not None:
        kind = "prefix_kv"
    given = {} if structure is None else {"structure_facts": structure.facts}
    return Request(*(facts_of(t) for t in (q, k, v)), structure_kind=kind, **given, **fields)


def run(name, inner, has, q, k, v, structure=None, *, causal=False, window=None, need_lse=True, out=None):
    """(out, lse, lowered request) of one composition over `inner`, whose slot has the features `has`."""
    composition = NAMED[name]
    request = request_for(q, k, v, structure, causal=causal, window=window, lse=need_lse, out=out is not None)
    lowered = composition.lower(request, has)
    assert isinstance(lowered, Request), lowered
    assert not lowered.out
    assert lowered.lse == need_lse
    module, _, bind = composition.bind.partition(":")
    call = getattr(importlib.import_module(module), bind)(inner, lowered)
    meta = None if structure is None else structure.bind(q.device, q.shape, k.shape)
    answer, lse = call(q, k, v, out, meta=meta, causal=causal, window=window, need_lse=need_lse, **CALL)
    return answer, lse, lowered


def assert_exact(name, inner, has, q, k, v, structure=None, *, causal=False, window=None):
    """The composition equals the reference: into a NaN-filled buffer with LSE, and by its gradients without."""
    want, want_lse = reference_attention(
        q, k, v, structure=structure or structures.Dense(), causal=causal, window=window, scale=CALL["scale"],
        softcap=CALL["softcap"], return_lse=True,
    )  # fmt: skip
    buffer = torch.full_like(want, float("nan"))
    out, lse, lowered = run(name, inner, has, q, k, v, structure, causal=causal, window=window, out=buffer)
    assert out is buffer
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    bare, none, _ = run(name, inner, has, *leaves, structure, causal=causal, window=window, need_lse=False)
    assert none is None
    theirs = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    again = reference_attention(
        *theirs, structure=structure or structures.Dense(), causal=causal, window=window, scale=CALL["scale"],
        softcap=CALL["softcap"],
    )  # fmt: skip
    weights = torch.arange(want.numel(), dtype=want.dtype).reshape(want.shape) % 5 - 2
    mine = torch.autograd.grad((bare * weights).sum(), leaves)
    for got, expected in zip(mine, torch.autograd.grad((again * weights).sum(), theirs), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)
    return lowered
