"""The conformance kit over npu:laser on the emulated device, with the least length of laser attention put aside.

For the kit's short tensors MindIE-SD runs another op, and npu:laser refuses; the kernel pads them as any others.
"""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import torch

from platforms.npu.tests.mindie_scenes import passed, scenes_of
from polyattn_npu import laser_range


def scene_short_tensors_through_the_kernel() -> None:
    from polyattn.testing import run_conformance
    from tests.emulators.npu import registry

    dispatch = importlib.import_module("mindiesd.layers.flash_attn.attention_forward")
    short = mock.patch.object(dispatch, "ASCEND_LASER_ATTENTION_MIN_SEQLEN", 0)
    with short, mock.patch.object(laser_range, "LEAST_ROWS", 0):
        report = run_conformance(
            "npu:laser", structures=["dense", "key_padding", "packed"], dtypes=[torch.float16, torch.bfloat16]
        )
    assert [str(failure) for failure in report.failures] == []
    counts = report.counts["npu:laser"]
    assert counts["dense"]["native"] > 80
    assert counts["key_padding"]["native"] > 10
    assert counts["packed"]["native"] > 10
    assert {call.op for call in registry.calls} == {"mindiesd::la"}


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("scene", scenes_of(globals()))
def test_kit(scene: str) -> None:
    passed(__name__, scene, soc="A2")  # no lint: scores of a poisoned sample are not finite by right
