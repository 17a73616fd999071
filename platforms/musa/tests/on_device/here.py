"""What the tests on a device share; on the emulator, the same backends are those of the CPU with a prefix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.reference import reference_attention
from polyattn.testing.compare import CEILINGS

#: Set by test_on_emulator.py for the process that it starts.
EMULATED = os.environ.get("EMULATED_MUSA") == "1"
DEVICE = "cpu" if EMULATED else "musa"
MARK = pytest.mark.emulated if EMULATED else pytest.mark.musa

#: Named ones are made to run; None is automatic choice, which on the emulator would be the CPU's.
Name = str | None
EVERY: tuple[Name, ...] = ("mate", "mudnn", "sdpa", "blocked") if EMULATED else (
    None, "mate", "mudnn", "sdpa", "blocked"
)  # fmt: skip
every_backend = pytest.mark.parametrize("backend", EVERY, ids=lambda name: name or "auto")


def full(backend: Name) -> Name:
    """The backend's name where the tests run."""
    return f"musa_{backend}" if EMULATED and backend is not None else backend


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16).to(DEVICE)


def attend(backend: Name, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    """`pa.attention`; a refusal skips, in the backend's own words, which the conformance kit judges."""
    try:
        return pa.attention(q, k, v, backend=full(backend), **given)
    except (pa.UnsupportedRequest, pa.BackendUnavailable) as refusal:
        skip_refused(backend, refusal)


def skip_refused(backend: Name, refusal: Any) -> None:
    """Skip with the backend's reasons; automatic choice refuses nothing of what is asked here."""
    if backend is None:
        raise refusal
    reasons = refusal.reasons.get(full(backend), ())
    assert any(reasons), f"{backend} gives no reason: {refusal}"
    pytest.skip(f"{backend}: {'; '.join(reasons)}")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Unit-normal numbers on the device, the same on every machine."""
    return here(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    """The reference, in float64 on the CPU."""
    return reference_attention(*(tensor.detach().cpu().double() for tensor in (q, k, v)), **given)


def assert_near(out: torch.Tensor, want: torch.Tensor) -> None:
    """As near as the kit asks of the dtype."""
    limit = CEILINGS[str(out.dtype).removeprefix("torch.")] * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(out.detach().cpu().double(), want, atol=limit, rtol=0)


def assert_rows(out: torch.Tensor, expected: Sequence[Any]) -> None:
    """Every head and channel of row s holds expected[s]; an exact 0 where that is expected."""
    want = torch.tensor(expected, dtype=torch.float64)[..., None, None].expand(out.shape)
    got = out.detach().cpu().double()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-2)
    assert bool((got[want == 0] == 0).all())
