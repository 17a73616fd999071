"""Where torch has no graphs, a BreakableGraph says so."""

import pytest
import torch

import polyattn as pa
from polyattn.graphs import BreakableGraph


def test_a_device_without_graphs_is_refused_by_name():
    with torch.no_grad(), pytest.raises(pa.UnsupportedRequest, match=r"none for cpu \(torch.cpu.CPUGraph\)") as told:
        BreakableGraph(torch.nn.Linear(2, 2))(torch.ones(1, 2))
    assert told.value.platform == "cpu"
