"""What the tests on a device share: tensors, calls that tell a refusal, what was asked of the vendor's op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.reference import reference_attention
from polyattn.testing.compare import CEILINGS
from polyattn_npu import fia_operator, fusion_forward

DEVICE = "npu"
#: The backends of this folder's tests; None is automatic choice.
OURS = ("fusion", "fia")
every_backend = pytest.mark.parametrize("backend", [None, *OURS], ids=lambda name: name or "auto")

Asked = list[dict[str, Any]]


def drawn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Unit-normal numbers on the device, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def qkv(
    q_rows: tuple[int, ...],
    k_rows: tuple[int, ...] | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [*q_rows,H,D], k and v [*k_rows,Hk,D]."""
    keys = q_rows if k_rows is None else k_rows
    q = drawn(*q_rows, heads, dim, dtype=dtype)
    return q, drawn(*keys, kv_heads, dim, dtype=dtype, seed=1), drawn(*keys, kv_heads, dim, dtype=dtype, seed=2)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    """The reference, in float64 on the CPU."""
    return reference_attention(*(tensor.detach().cpu().double() for tensor in (q, k, v)), **given)


def assert_near(out: torch.Tensor, want: torch.Tensor) -> None:
    """As near as the kit asks of the dtype; infinities where they belong."""
    limit = CEILINGS[str(out.dtype).removeprefix("torch.")]
    most = float(want[want.isfinite()].abs().max()) if bool(want.isfinite().any()) else 1.0
    torch.testing.assert_close(out.detach().cpu().double(), want.double(), atol=limit * max(1.0, most), rtol=0)


def assert_right(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """The backend's own slot ran and gave the reference's output and LSE."""
    with pa.record_routes() as log:
        out, lse = pa.attention(q, k, v, backend=backend, return_lse=True, **given)
    assert [entry.route for entry in log.entries] == [f"npu:{backend}"]
    want, want_lse = exact(q, k, v, **given, return_lse=True)
    assert_near(out, want)
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=2e-2, rtol=0)
    return out


def refused(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> str:
    """The reasons of a backend against a call, as `explain` has them."""
    (decision,) = (d for d in pa.explain(q, k, v, backend=backend, **given).decisions if d.backend.name == backend)
    return "; ".join(getattr(decision, "reasons", ()))


def record(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is asked of the two ops from now on: their arguments by name, beside the tensors q, k and v."""
    asked: Asked = []
    for module in (fusion_forward, fia_operator):
        monkeypatch.setattr(module, "_operator", _recording(module._operator(), asked))
    return asked


def _recording(op: Any, asked: Asked) -> Callable[[], Any]:
    def call(*tensors: torch.Tensor, **given: Any) -> Any:
        asked.append({name: value for name, value in given.items() if name not in ("query", "key", "value")})
        return op(*tensors, **given)

    return lambda: call
