"""Quantisation as asked for, and the layers and steps that stay out of it."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from polyattn.quant import as_quant, layer_index, skipped


@pytest.mark.parametrize(("prefix", "index"), [("blocks.3.attn1", 3), ("attn", None), ("", None), ("l12.2", 12)])
def test_the_layer_index_is_the_first_integer_of_the_prefix(prefix: str, index: int | None) -> None:
    assert layer_index(prefix) == index


def test_none_and_auto_are_off_and_unknown_methods_list_the_known() -> None:
    assert as_quant(None) is None
    assert as_quant("auto") is None
    assert as_quant("fp8") == pa.Quant("fp8")
    with pytest.raises(ValueError, match="'fp9'.*fp8, int8, mxfp8, mxfp4"):
        as_quant("fp9")
    with pytest.raises(TypeError, match="quant"):
        as_quant(8)


def test_skips_are_non_negative_integers() -> None:
    with pytest.raises(ValueError, match="skip_layers"):
        pa.Quant("fp8", skip_layers=(-1,))
    with pytest.raises(ValueError, match="skip_steps"):
        pa.Quant("fp8", skip_steps=(True,))
    with pytest.raises(TypeError, match="skip_layers"):
        pa.Quant("fp8", skip_layers="0-2")  # type: ignore[arg-type]


def test_a_skipped_layer_or_step_says_so() -> None:
    quant = pa.Quant("fp8", skip_layers=(0,), skip_steps=(0, 1))
    assert "layer 0" in (skipped(quant, 0, 5) or "")
    assert "step 1" in (skipped(quant, 3, 1) or "")
    assert skipped(quant, 3, 5) is None


def test_an_unknown_step_counts_as_skipped_and_an_unknown_layer_is_an_error() -> None:
    assert "unknown" in (skipped(pa.Quant("fp8", skip_steps=(0,)), 0, None) or "")
    with pytest.raises(ValueError, match="skip_layers"):
        skipped(pa.Quant("fp8", skip_layers=(0,)), None, None)


def test_the_cpu_refuses_quantisation_when_the_layer_is_built() -> None:
    with pytest.raises(pa.UnsupportedRequest, match="'fp8'") as refusal:
        pa.Attention(2, 64, quant="fp8")
    assert isinstance(refusal.value, NotImplementedError)
    assert refusal.value.platform == "cpu"
    assert refusal.value.reasons


def test_a_skipped_quantisation_runs_unquantised_and_the_route_says_so() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pa.step(0, 10), pa.record_routes() as log:
        out = pa.attention(q, q, q, quant=pa.Quant("fp8", skip_steps=(0,)))
    assert torch.equal(out, pa.attention(q, q, q))
    assert any("fp8 skipped" in note for note in log.entries[0].notes)
    with pa.step(1, 10), pytest.raises(pa.UnsupportedRequest, match="fp8"):
        pa.attention(q, q, q, quant=pa.Quant("fp8", skip_steps=(0,)))
