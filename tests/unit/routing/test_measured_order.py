"""An order of backends that the user measured goes before the platform's own, where it was measured."""

from __future__ import annotations

import json

import pytest
import torch

import polyattn as pa
from polyattn.bench.order_file import FORMAT
from polyattn.machine import machine_of
from polyattn.plan import owner_of


@pytest.fixture
def written(tmp_path, monkeypatch):
    def write(order, **changed):
        arch = machine_of(owner_of("cpu"), "cpu").arch
        entry = {"structure": "dense", "dtype": "float32", "head_dim": 8, "page_size": None, "size": 5, "order": order}
        facts = {"format": FORMAT, "platform": "cpu", "arch": arch, "orders": [entry | {"milliseconds": {}}]} | changed
        path = tmp_path / "order.json"
        path.write_text(json.dumps(facts))
        monkeypatch.setenv("POLYATTN_ORDER", str(path))
        pa.reload_environment()
        return path

    yield write
    monkeypatch.undo()
    pa.reload_environment()


Q = torch.zeros(1, 4, 2, 8)


def test_the_measured_order_decides_where_it_was_measured(written):
    assert pa.explain(Q, Q, Q).chosen.name == "cpu:sdpa"
    written(["blocked", "sdpa"])
    assert pa.explain(Q, Q, Q).chosen.name == "cpu:blocked"
    double = Q.double()
    assert pa.explain(double, double, double).chosen.name == "cpu:sdpa"


def test_where_gradients_are_needed_nothing_was_measured(written):
    written(["blocked", "sdpa"])
    trained = Q.clone().requires_grad_()
    assert pa.explain(trained, Q, Q).chosen.name == "cpu:sdpa"


def test_an_order_of_other_sizes_or_head_dims_says_nothing(written):
    written(["blocked"])
    longer, wider = torch.zeros(1, 64, 2, 8), torch.zeros(1, 4, 2, 16)
    assert pa.explain(longer, longer, longer).chosen.name == "cpu:sdpa"
    assert pa.explain(wider, wider, wider).chosen.name == "cpu:sdpa"


def test_an_order_of_another_device_says_nothing(written):
    written(["blocked"], arch="another")
    assert pa.explain(Q, Q, Q).chosen.name == "cpu:sdpa"


def test_a_name_that_is_not_here_is_passed_over(written):
    written(["kernel_of_another_machine", "blocked"])
    assert pa.explain(Q, Q, Q).chosen.name == "cpu:blocked"


def test_a_file_that_cannot_be_read_is_named_with_the_variable(written, tmp_path, monkeypatch):
    written(["blocked"]).write_text("no order")
    with pytest.raises(ValueError) as error:
        pa.attention(Q, Q, Q)
    assert "POLYATTN_ORDER" in str(error.value)
    assert "order.json" in str(error.value)
    monkeypatch.setenv("POLYATTN_ORDER", str(tmp_path / "nowhere.json"))
    pa.reload_environment()
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        pa.attention(Q, Q, Q)
