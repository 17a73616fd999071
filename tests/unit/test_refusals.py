"""Refusals do not depend on what was called before, nor on whether the call is compiled, empty, or made by a layer."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.vendor import Request, TensorFacts

Q = torch.randn(2, 6, 2, 8)
EMPTY = torch.randn(0, 6, 2, 8)


@pytest.mark.parametrize(
    ("valid", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"window": 1}, {"window": True}),
        ({"window": 1}, {"window": 1.0}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"return_lse": False}, {"return_lse": "no"}),
    ],
)
def test_an_equal_value_of_another_type_is_refused_after_a_valid_call_too(valid: Any, wrong: Any) -> None:
    pa.attention(Q, Q, Q, **valid)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        pa.attention(Q, Q, Q, **wrong)


def test_an_empty_call_is_routed_and_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="'nonsense'"):
        pa.attention(EMPTY, EMPTY, EMPTY, backend="nonsense")
    with pytest.raises(pa.UnsupportedRequest, match="fp8"):
        pa.attention(EMPTY, EMPTY, EMPTY, quant="fp8")
    with pa.record_routes() as log:
        pa.attention(EMPTY, EMPTY, EMPTY)
    assert log.entries[0].route == "cpu:sdpa"


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(*, fullgraph: bool, **arguments: Any) -> Any:
    return torch.compile(lambda q: pa.attention(q, q, q, **arguments), backend="eager", fullgraph=fullgraph)


@pytest.mark.parametrize("out", [torch.empty(1, 6, 2, 8), torch.empty(2, 6, 2, 8, dtype=torch.float64)])
def test_a_wrong_buffer_is_refused_in_a_graph_too(out: torch.Tensor) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="out"):
        compiled(fullgraph=False, out=out)(Q)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"joint": pa.Joint(Q, Q, Q)}, "joint="),
        ({"parallel": pa.distributed.SequenceParallel()}, "parallel="),
    ],
)
def test_what_graphs_cannot_hold_is_refused_by_name(arguments: Any, word: str) -> None:
    with torch.no_grad(), pytest.raises(Exception, match=word):
        compiled(fullgraph=True, **arguments)(Q)


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9),
    reason="an older Dynamo raises the refusal instead of breaking the graph",
)
def test_where_a_graph_may_break_such_a_call_is_made_outside_of_it() -> None:
    joint = pa.Joint(Q, Q, Q)
    with torch.no_grad():
        assert torch.equal(compiled(fullgraph=False, joint=joint)(Q), pa.attention(Q, Q, Q, joint=joint))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"softcap": 3.0, "backend": "sdpa"}, "softcap"),
        ({"quant": "fp8"}, "fp8"),
    ],
)
def test_a_layer_refuses_when_built_what_it_can_never_do(arguments: Any, word: str) -> None:
    with pytest.raises(pa.UnsupportedRequest, match=word):
        pa.Attention(2, 8, **arguments)
    with pytest.raises(TypeError, match="parallel"):
        pa.Attention(2, 8, parallel="x")


def test_a_copied_layer_shares_nothing_with_its_original() -> None:
    layer = pa.Attention(2, 8)
    twin = copy.deepcopy(layer)
    twin.register_forward_hook(lambda *_: None)
    assert not layer._forward_hooks
    twin.backend = "blocked"
    assert layer.backend is None


def test_supports_follows_the_choices_that_a_call_would() -> None:
    layer = pa.Attention(2, 8)
    assert layer.supports(pa.Capability.SOFTCAP)
    with pa.use_backend("sdpa"):
        assert not layer.supports(pa.Capability.SOFTCAP)
    assert not pa.Attention(2, 8, backend="sdpa").supports(pa.Capability.SOFTCAP)


def test_explain_takes_what_the_call_takes() -> None:
    text = torch.randn(2, 3, 2, 8)
    told = pa.explain(Q, Q, Q, joint=pa.Joint(text, text, text), replicated=None, parallel=None)
    assert told.request.q.shape == (2, 9, 2, 8)
    assert {name: verdict for name, verdict, _ in pa.explain(Q, Q, Q, backend="blocked").rows()} == {
        "cpu:blocked": "chosen",
        "cpu:sdpa": "not chosen",
    }


def test_explain_invents_no_device_for_an_installed_platform_without_one() -> None:
    facts = TensorFacts.contiguous((1, 8, 2, 64), "bfloat16")
    declined = {report.device_type for report in pa.platforms() if report.status == "declined"}
    for device_type in sorted(kind for kind in declined if kind):
        with pytest.raises(pa.BackendUnavailable, match="machine="):
            pa.explain(Request(facts, facts, facts, device=f"{device_type}:0"))


@pytest.mark.parametrize(
    ("glued", "word"),
    [
        ({"joint": pa.Joint(Q[:, :, :1], Q[:, :, :1], Q[:, :, :1])}, "joint"),
        ({"joint": pa.Joint(Q.double(), Q.double(), Q.double())}, "joint"),
        ({"replicated": pa.Replicated(prefix=99)}, "99"),
        ({"replicated": pa.Replicated(suffix=(Q[:1], Q[:1], Q[:1]))}, "replicated.suffix"),
    ],
)
def test_what_does_not_glue_is_refused_by_name(glued: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pa.attention(Q, Q, Q, **glued)


def test_under_strict_every_slow_call_raises_not_only_the_first() -> None:
    code = """
import torch, polyattn as pa
from polyattn import call
from polyattn.vendor import Backend, Features, Slot
import polyattn.plan as plan
dense = Backend("dense", (Slot("polyattn.backends.cpu:sdpa_plain", Features(dtypes=frozenset({"float32"}))),))
plan.backends_of = lambda platform: (dense,)
q = torch.randn(6, 2, 8)
for _ in range(2):
    try:
        pa.attention(q, q, q, structure=pa.Packed.from_lengths([4, 2]))
    except pa.PolyattnWarning as warning:
        print("loop(cpu:dense)" in str(warning), "'packed' is not supported" in str(warning))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"POLYATTN_STRICT": "1"},
    )  # fmt: skip
    assert run.stdout.split() == ["True"] * 4


_WITHOUT_A_WINDOW = {
    "spans": lambda: pa.Spans([[(1, 3)], [(0, 4)]]),
    "tiles": lambda: pa.VideoTiles(pa.VideoLayout((1, 2, 3)), (1, 1, 3), topk=1),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (None, None), (None, 0), (None, 2), (3, 0), 1])
@pytest.mark.parametrize("name", _WITHOUT_A_WINDOW)
def test_the_reference_refuses_a_window_where_the_call_does_and_takes_one_of_no_effect(
    name: str, window: Any, causal: bool
) -> None:
    structure = _WITHOUT_A_WINDOW[name]()
    no_effect = window in (None, (None, None)) or (causal and window in ((None, 0), (None, 2)))
    for attend in (pa.attention, pa.reference_attention):
        given = {"structure": structure, "causal": causal, "window": window}
        if no_effect and not (causal and name == "tiles"):
            want = pa.reference_attention(Q, Q, Q, structure=structure, causal=causal)
            torch.testing.assert_close(attend(Q, Q, Q, **given).double(), want, atol=1e-5, rtol=0)
        else:
            with pytest.raises(pa.UnsupportedRequest):
                attend(Q, Q, Q, **given)
