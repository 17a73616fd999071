"""A step's structure is sent to the device and worked out once for the 40 layers of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import assert_right
from platforms.cuda.tests.on_device.structures import Made, every_structure
from platforms.cuda.tests.on_device.waiting import no_waiting

pytestmark = pytest.mark.cuda
LAYERS, STEPS = 40, 3


@every_structure
def test_40_layers_prepare_a_structure_once_a_step(make: Callable[[torch.dtype, int], Made]) -> None:
    for step in range(STEPS):
        made = make(torch.bfloat16, step)
        given = dict(made.given)
        structure, causal = given.pop("structure", None), given.pop("causal", False)
        layers = [
            pa.Attention(made.q.shape[-2], made.q.shape[-1], made.k.shape[-2], causal=causal) for _ in range(LAYERS)
        ]
        layers[0](*made.tensors, structure, **given)
        torch.cuda.synchronize()
        with no_waiting():  # what the first call sent, the others find
            for layer in layers[1:]:
                out = layer(*made.tensors, structure, **given)
        assert structure is None or structure.builds <= 1
        assert_right(out, *made.tensors, **made.given)
