"""What the conformance kit cannot know of this package: its detection, its order, the reasons it gives."""

import math
import os
import subprocess
import sys

import pytest
import torch

import polyattn as pa
from polyattn.vendor import Declined
from polyattn_toychip import detection


def tensors(dim: int = 32, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v on the device."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, rows, 4, dim, generator=generator).to("toychip") for _ in range(3))
    return q, k, v


def test_the_device_is_found_and_comes_before_the_cpu() -> None:
    """Priority decides what code without a tensor sees."""
    assert pa.current_platform.is_toychip()
    (report,) = (report for report in pa.platforms() if report.name == "toychip")
    assert report.status == "accepted"
    assert "toychip_runtime" in report.detail


def test_a_hidden_device_is_declined_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what a user can change."""
    monkeypatch.setenv("TOYCHIP_VISIBLE_DEVICES", "")
    assert detection.probe() == Declined("no device is seen, with TOYCHIP_VISIBLE_DEVICES=''")


def test_without_its_runtime_torch_still_imports_and_the_platform_says_what_is_missing() -> None:
    """torch is told to load no plugin, as it does where one is broken."""
    code = "import polyattn as pa; print(*pa.platforms(), sep='\\n')"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "toychip: declined" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stdout


def test_the_kernel_runs_what_it_can_and_the_rest_is_refused_by_name() -> None:
    """Both directions: claimed goes to the kernel; not claimed has a reason and another route."""
    q, k, v = tensors()
    assert pa.explain(q, k, v, causal=True).chosen.name == "toychip:rows"
    windowed = pa.explain(q, k, v, window=3)
    assert windowed.chosen.name == "toychip:blocked"
    assert "window is not supported" in str(windowed)
    with pytest.raises(pa.UnsupportedRequest, match="head_dim"):
        pa.attention(*tensors(dim=160), backend="rows")


@pytest.mark.parametrize("backend", ["rows", "blocked"])
def test_the_answer_is_the_references(backend: str) -> None:
    """More queries than keys: the first rows see nothing, and the kernel alone would answer NaN for them."""
    q, k, v = tensors()
    k, v = k[:, :8], v[:, :8]
    out, lse = pa.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    want, want_lse = pa.reference_attention(q.cpu(), k.cpu(), v.cpu(), causal=True, return_lse=True)
    assert out.device.type == "toychip"
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=2e-5, rtol=0)
    assert lse.cpu()[0, 0, 0].item() == -math.inf


def test_tensors_of_the_cpu_stay_the_cpus() -> None:
    """A platform owns its device type, and no other."""
    q = torch.randn(1, 4, 2, 16)
    assert pa.explain(q, q, q).chosen.name == "cpu:sdpa"
