"""Calls a slot of the core as the core does, beside the reference: shared by the tests of all structures."""

from __future__ import annotations

from typing import Any

import torch

from polyattn import structures
from polyattn.backends import cpu, generic
from polyattn.reference import reference_attention

#: Every implementation of the core's slots: module and prefix of the slot functions.
IMPLEMENTATIONS = {
    "cpu:sdpa": (cpu, "sdpa"),
    "generic:sdpa": (generic, "sdpa"),
    "blocked": (generic, "blocked"),
}
WITH_LSE = [name for name in IMPLEMENTATIONS if name != "generic:sdpa"]

DEFAULTS: dict[str, Any] = {
    "causal": False, "scale": 0.3, "window": None, "softcap": 0.0, "need_lse": False, "options": (),
}  # fmt: skip


def kind_of(structure: Any) -> str:
    """The kind under which the core looks for a slot."""
    if structure is None:
        return "dense"
    if structure.kind == "key_padding" and structure.facts.common_prefix is not None:
        return "prefix_kv"
    return structure.kind


def slot_of(implementation: str, structure: Any) -> Any:
    module, prefix = IMPLEMENTATIONS[implementation]
    return getattr(module, f"{prefix}_{kind_of(structure)}")


def run(implementation: str, q, k, v, structure=None, out=None, **call):
    """(out, lse) of the slot that serves `structure`."""
    meta = None if structure is None else structure.bind(q.device, q.shape, k.shape)
    return slot_of(implementation, structure)(q, k, v, out, meta=meta, **{**DEFAULTS, **call})


def expected(q, k, v, structure=None, **call):
    """(out, lse) of the reference, in float64."""
    given = {name: call[name] for name in ("causal", "window", "softcap", "scale") if name in call}
    return reference_attention(
        q, k, v, structure=structure or structures.Dense(), return_lse=True, **{"scale": DEFAULTS["scale"], **given}
    )


def assert_equal(implementation: str, q, k, v, structure=None, **call):
    """Output, LSE where there is one, gradients and a NaN-filled `out` buffer agree with the reference."""
    want, want_lse = expected(q, k, v, structure, **call)
    has_lse = implementation in WITH_LSE
    buffer = torch.full_like(want, float("nan"))
    with torch.no_grad():
        got, lse = run(implementation, q, k, v, structure, buffer, need_lse=has_lse, **call)
    assert got is buffer
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    if has_lse:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(
        gradients(lambda *t: run(implementation, *t, structure, **call)[0], q, k, v),
        gradients(lambda *t: expected(*t, structure, **call)[0], q, k, v),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)


def gradients(function, *tensors):
    """Gradients of a fixed weighting of the output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape) % 7 - 3
    return torch.autograd.grad((out * weights).sum(), leaves)


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def batch(queries: int, keys: int, *, samples=2, q_heads=4, kv_heads=2, dim=8, v_dim=None, dtype=torch.float64):
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv]."""
    return (
        heads(samples, queries, q_heads, dim, dtype=dtype),
        heads(samples, keys, kv_heads, dim, seed=1, dtype=dtype),
        heads(samples, keys, kv_heads, v_dim or dim, seed=2, dtype=dtype),
    )


def tokens(queries: int, keys: int, *, q_heads=4, kv_heads=2, dim=8, v_dim=None):
    """q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv]."""
    return tuple(
        tensor[0]
        for tensor in batch(queries, keys, samples=1, q_heads=q_heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    )
