"""What the tests on a device share: which backends there are, their tensors, and a call that tells a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.discovery import backends_of, installed_platform
from polyattn.reference import reference_attention
from polyattn.testing.compare import CEILINGS

PLATFORM = "cuda"
DEVICE = torch.device("cuda")
DTYPES = ("bfloat16", "float16", "float32")

#: Named ones are made to run; None is automatic choice.
Name = str | None


def _backends() -> dict[str, Any]:
    platform = installed_platform(PLATFORM)
    return {} if platform is None else {backend.name: backend for backend in backends_of(platform)}


BACKENDS = _backends()
EVERY = (None, *BACKENDS)
every_backend = pytest.mark.parametrize("backend", EVERY, ids=lambda name: name or "auto")


def takes(switch: str) -> pytest.MarkDecorator:
    """Every backend that claims this for one of its slots, and automatic choice."""
    names = [
        name for name, backend in BACKENDS.items() if any(getattr(slot.features, switch) for slot in backend.slots)
    ]
    return pytest.mark.parametrize("backend", [None, *names], ids=lambda name: name or "auto")


def dtype_of(backend: Name) -> torch.dtype:
    """The first of these dtypes that the backend takes."""
    if backend is None:
        return torch.bfloat16
    claimed = frozenset[str]().union(*(slot.features.dtypes for slot in BACKENDS[backend].slots))
    return getattr(torch, next(name for name in DTYPES if name in claimed))


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Unit-normal numbers on the device, the same on every machine."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def qkv(
    q_rows: tuple[int, ...],
    k_rows: tuple[int, ...] | None = None,
    *,
    heads: int = 8,
    kv_heads: int | None = None,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q [*q_rows,H,D], k and v [*k_rows,Hk,D]."""
    rows = [q_rows, q_rows if k_rows is None else k_rows, q_rows if k_rows is None else k_rows]
    counts = [heads, kv_heads or heads, kv_heads or heads]
    return [
        drawn(*front, count, dim, dtype=dtype, seed=3 * seed + place)
        for place, (front, count) in enumerate(zip(rows, counts, strict=True))
    ]


def attend(backend: Name, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    """`pa.attention`; a refusal skips, in the backend's own words, which the conformance kit judges."""
    try:
        return pa.attention(q, k, v, backend=backend, **given)
    except (pa.UnsupportedRequest, pa.BackendUnavailable) as refusal:
        skip_refused(backend, refusal)


def skip_refused(backend: Name, refusal: Any) -> None:
    """Skip with the backend's reasons; automatic choice refuses nothing of what is asked here."""
    if backend is None:
        raise refusal
    reasons = refusal.reasons.get(backend, ())
    assert any(reasons), f"{backend} gives no reason: {refusal}"
    pytest.skip(f"{backend}: {'; '.join(reasons)}")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """The reference, in float64 on the CPU."""
    return reference_attention(*(tensor.detach().cpu().double() for tensor in (q, k, v)), **given)


def assert_right(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> None:
    """As near to the reference as the kit asks of the dtype."""
    assert out.device == q.device
    assert_near(out, exact(q, k, v, **given))


def assert_near(out: torch.Tensor, want: torch.Tensor) -> None:
    """As near as the kit asks of the dtype."""
    limit = CEILINGS[str(out.dtype).removeprefix("torch.")]
    torch.testing.assert_close(out.cpu().double(), want, atol=limit * max(1.0, float(want.abs().max())), rtol=0)


def poison(*like: torch.Tensor) -> None:
    """Leave NaN in the memory that the allocator hands out next for tensors of these sizes."""
    held = [torch.full_like(tensor, float("nan")) for tensor in like for _ in range(4)]
    del held
