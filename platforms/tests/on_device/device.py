"""A device that tests run on; on its emulator, the same backends are those of the CPU with a prefix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.reference import reference_attention
from polyattn.testing.compare import CEILINGS

#: Of a backend. Named ones are made to run; None is automatic choice, which on the emulator would be the CPU's.
Name = str | None


@dataclass(frozen=True)
class Device:
    """One vendor's."""

    vendor: str
    #: The backends of the maker's own packages.
    packages: tuple[str, ...]
    #: The others that it has; those of `only_real` run on no emulator here.
    portable: tuple[str, ...] = ("sdpa", "blocked")
    only_real: tuple[str, ...] = ()
    collective: str = ""
    #: torch's type of these devices, where it is not the vendor's name.
    device_type: str = ""
    #: What most tensors here are of.
    half: torch.dtype = torch.float16

    @property
    def emulated(self) -> bool:
        """Whether this process was started by the vendor's test_on_emulator.py."""
        return os.environ.get(f"EMULATED_{self.vendor.upper()}") == "1"

    @property
    def device(self) -> str:
        """Where tensors are."""
        return "cpu" if self.emulated else self.device_type or self.vendor

    @property
    def platform(self) -> str:
        """Whose backends they are."""
        return "cpu" if self.emulated else self.vendor

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Of every test on it."""
        mark: pytest.MarkDecorator = getattr(pytest.mark, "emulated" if self.emulated else self.vendor)
        return mark

    @property
    def backends(self) -> tuple[Name, ...]:
        """All that the tests go through."""
        named = (*self.packages, *self.portable)
        return named if self.emulated else (None, *self.packages, *self.only_real, *self.portable)

    def full(self, backend: Name) -> Name:
        """The backend's name where the tests run."""
        return f"{self.vendor}_{backend}" if self.emulated and backend is not None else backend

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """In half precision on the device."""
        return tensor.to(self.half).to(self.device)

    def attend(self, backend: Name, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        """`pa.attention`; a refusal skips, in the backend's own words, which the conformance kit judges."""
        try:
            return pa.attention(q, k, v, backend=self.full(backend), **given)
        except (pa.UnsupportedRequest, pa.BackendUnavailable) as refusal:
            self.skip_refused(backend, refusal)

    def skip_refused(self, backend: Name, refusal: Any) -> None:
        """Skip with the backend's reasons; automatic choice refuses nothing of what is asked here."""
        if backend is None:
            raise refusal
        reasons = refusal.reasons.get(self.full(backend), ())
        assert any(reasons), f"{backend} gives no reason: {refusal}"
        pytest.skip(f"{backend}: {'; '.join(reasons)}")

    def drawn(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Unit-normal numbers on the device, the same on every machine."""
        return self.here(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


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
