"""Video tiles through the public call: the gate, what runs densely and why, what is refused, and by what words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn import call, plan
from polyattn.structures.video_gate import GatedTiles

LAYOUT = pa.VideoLayout((5, 5, 5), prefix=(6,), used=131)
ROWS = 140


def tiles(layout: pa.VideoLayout = LAYOUT, **by: Any) -> pa.VideoTiles:
    return pa.VideoTiles(layout, (4, 4, 4), **{"topk": 2, **by})


def drawn(rows: int = ROWS, heads: int = 4, width: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, rows, heads, width, generator=torch.Generator().manual_seed(rows + heads + width))


Q, K, V, GATE = drawn(), drawn(heads=2), drawn(heads=2, width=24), drawn(width=24)


def near(out: torch.Tensor, **asked: Any) -> None:
    torch.testing.assert_close(out.double(), pa.reference_attention(Q, K, V, **asked), atol=2e-5, rtol=0)


# the gate


def test_a_gate_weighs_the_coarse_term_and_none_leaves_it_out() -> None:
    near(pa.attention(Q, K, V, structure=tiles(), gate=GATE), structure=tiles(), gate=GATE)
    near(pa.attention(Q, K, V, structure=tiles()), structure=tiles())
    none = pa.attention(Q, K, V, structure=tiles(), gate=torch.zeros_like(GATE))
    torch.testing.assert_close(none, pa.attention(Q, K, V, structure=tiles()))


def test_rows_of_a_gate_past_q_are_dropped_and_those_past_the_tokens_not_read() -> None:
    longer = torch.cat([GATE, torch.full((2, 9, 4, 24), float("nan"))], dim=1)
    longer[:, 131:] = float("inf")
    near(pa.attention(Q, K, V, structure=tiles(), gate=longer), structure=tiles(), gate=GATE)


@pytest.mark.parametrize(("gate", "error", "words"), [
    (GATE[:, :139], ValueError, r"gate: .*\[2, 140, 4, 24\].*\[2, 139, 4, 24\]"),
    (GATE[:1], ValueError, r"gate: .*\[1, 140, 4, 24\]"),
    (GATE[..., :16], ValueError, r"gate: .*\[2, 140, 4, 16\]"),
    (GATE.flatten(2), ValueError, r"gate: .*\[2, 140, 96\]"),
    (GATE.half(), TypeError, "gate: q's dtype float32 .*float16"),
    (GATE.int(), TypeError, "gate: a floating dtype"),
    (1.0, TypeError, "gate: a tensor .*float"),
    (GATE.to("meta"), ValueError, "gate: .*meta.*cpu"),
])  # fmt: skip
def test_a_gate_that_does_not_fit_is_refused(gate: Any, error: type[Exception], words: str) -> None:
    layer = pa.Attention(4, 16, 2)
    for attend in (pa.attention, pa.explain):
        with pytest.raises(error, match=words):
            attend(Q, K, V, structure=tiles(), gate=gate)
    with pytest.raises(error, match=words):
        layer(Q, K, V, tiles(), gate=gate)


@pytest.mark.parametrize("structure", [None, pa.KeyPadding.from_lengths([140, 3], 140)])
def test_other_structures_take_no_gate(structure: Any) -> None:
    with pytest.raises(ValueError, match="gate: only VideoTiles"):
        pa.attention(Q, K, V, structure=structure, gate=GATE)


def test_a_gate_and_an_lse_do_not_go_together() -> None:
    _, lse = pa.attention(Q, K, V, structure=tiles(), return_lse=True)
    assert lse[:, :, 131:].isneginf().all()
    for attend in (pa.attention, pa.explain):
        with pytest.raises(pa.UnsupportedRequest, match="VideoTiles with a gate has no LSE"):
            attend(Q, K, V, structure=tiles(), gate=GATE, return_lse=True)


def test_a_layer_takes_the_gate_too() -> None:
    layer = pa.Attention(4, 16, 2)
    near(layer(Q, K, V, tiles(), gate=GATE), structure=tiles(), gate=GATE)
    assert layer.last_route.request.structure_facts.video.gate


def test_a_gate_that_alone_wants_a_gradient_gets_it() -> None:
    gate = GATE.clone().requires_grad_()
    structure = tiles()
    assert not pa.attention(Q, K, V, structure=structure, gate=GATE).requires_grad
    out = pa.attention(Q, K, V, structure=structure, gate=gate)
    out.sum().backward()
    assert gate.grad is not None
    with torch.no_grad():
        assert not pa.attention(Q, K, V, structure=structure, gate=gate).requires_grad


def test_under_autocast_the_gate_is_cast_as_q_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = pa.attention(Q, K, V, structure=tiles(), gate=GATE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), pa.reference_attention(Q, K, V, structure=tiles(), gate=GATE), atol=0.2, rtol=0
    )


def test_a_joint_sequence_has_a_gate_of_all_its_rows() -> None:
    joint = pa.Joint(Q[:, :6], K[:, :6], V[:, :6], where="front")
    out = pa.attention(Q[:, 6:], K[:, 6:], V[:, 6:], structure=tiles(), gate=GATE, joint=joint)
    near(out, structure=tiles(), gate=GATE)


def test_calls_with_gates_share_one_plan_and_one_set_of_tables() -> None:
    structure = tiles()
    pa.attention(Q, K, V, structure=structure, gate=GATE)
    before = len(call._plans)
    for _ in range(3):
        pa.attention(Q, K, V, structure=structure, gate=torch.rand_like(GATE))
    assert len(call._plans) == before
    structure.bind(Q.device, Q.shape, K.shape)
    assert structure.builds == 0  # the calls with gates derived it


def test_no_gate_outlives_its_call() -> None:
    import gc
    import weakref

    gate = torch.rand_like(GATE)
    gone = weakref.ref(gate)
    pa.attention(Q, K, V, structure=tiles(), gate=gate)
    del gate
    gc.collect()
    assert gone() is None
    assert not [thing for thing in gc.get_objects() if type(thing) is GatedTiles]


# graphs


def test_a_graph_takes_tiles_and_gate_without_a_break() -> None:
    structure = tiles()
    compiled = torch.compile(
        lambda q, k, v, gate: pa.attention(q, k, v, structure=structure, gate=gate), fullgraph=True, backend="aot_eager"
    )
    near(compiled(Q, K, V, GATE), structure=structure, gate=GATE)
    inputs = [x.clone().requires_grad_() for x in (Q, K, V, GATE)]
    found = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    exact = [x.double().requires_grad_() for x in (Q, K, V, GATE)]
    want = torch.autograd.grad(pa.reference_attention(*exact[:3], structure=structure, gate=exact[3]).sum(), exact)
    for ours, right in zip(found, want, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=2e-4, rtol=0)


def test_tiles_built_inside_a_graph_are_refused_by_name() -> None:
    compiled = torch.compile(lambda q: pa.attention(q, q, q, structure=tiles()), fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match="VideoTiles|VideoLayout|structure"):
        compiled(Q)


# what runs densely


def test_all_tiles_kept_take_a_dense_route_with_every_row_and_the_gate() -> None:
    structure = tiles(topk=8)
    for gate in (None, GATE):
        explained = pa.explain(Q, K, V, structure=structure, gate=gate)
        assert explained.chosen.request.structure_kind == "dense"
        assert "video_tiles runs dense: all tiles are kept (8)" in explained.chosen.notes
        assert "all tiles are kept (8)" in str(explained)
        out = pa.attention(Q, K, V, structure=structure, gate=gate)
        assert out.shape == (2, ROWS, 4, 24)
        near(out, structure=structure, gate=gate)
    _, lse = pa.attention(Q, K, V, structure=structure, return_lse=True)
    torch.testing.assert_close(
        lse.double(), pa.reference_attention(Q, K, V, structure=structure, return_lse=True)[1], atol=1e-5, rtol=0
    )


def test_a_buffer_and_gradients_go_through_the_dense_route_too() -> None:
    structure, buffer = tiles(topk=8), torch.full((2, ROWS, 4, 24), float("nan"))
    assert pa.attention(Q, K, V, structure=structure, gate=GATE, out=buffer) is buffer
    near(buffer, structure=structure, gate=GATE)
    q = Q.clone().requires_grad_()
    pa.attention(q, K, V, structure=structure, gate=GATE).sum().backward()
    assert q.grad is not None
    assert not q.grad[:, 131:].any()


def test_sparse_numerics_are_kept_where_asked() -> None:
    structure = tiles(topk=8, keep_sparse_numerics=True)
    chosen = pa.explain(Q, K, V, structure=structure, gate=GATE).chosen
    assert (chosen.request.structure_kind, chosen.notes) == ("video_tiles", ())
    near(pa.attention(Q, K, V, structure=structure, gate=GATE), structure=structure, gate=GATE)


def test_a_short_video_is_refused_with_the_way_out_or_runs_densely() -> None:
    with pytest.raises(pa.UnsupportedRequest, match="131 rows .*min_seq_len=512.*fallback='dense'"):
        pa.attention(Q, K, V, structure=tiles(min_seq_len=512))
    refused = pa.explain(Q, K, V, structure=tiles(min_seq_len=512))
    assert refused.chosen is None
    assert "min_seq_len=512" in str(refused)
    structure = tiles(min_seq_len=512, fallback="dense")
    assert any("min_seq_len=512" in note for note in pa.explain(Q, K, V, structure=structure).chosen.notes)
    out = pa.attention(Q, K, V, structure=structure, gate=GATE)
    near(out, structure=structure, gate=GATE)
    near(out, structure=tiles(topk=8), gate=GATE)


UNTAKEN: dict[str, Any] = {"backend": "blocked", "deterministic": True}


def test_what_no_backend_takes_is_an_error_with_reasons() -> None:
    with pytest.raises(pa.UnsupportedRequest, match="deterministic=True") as refusal:
        pa.attention(Q, K, V, structure=tiles(), **UNTAKEN)
    assert refusal.value.reasons["blocked"]


def test_what_no_backend_takes_runs_densely_where_the_caller_says_so() -> None:
    structure = tiles(fallback="dense")
    explained = pa.explain(Q, K, V, structure=structure, **UNTAKEN)
    assert explained.chosen.name == "cpu:blocked"
    (note,) = explained.chosen.notes
    assert note.startswith("video_tiles runs dense, as its fallback says: ")
    assert "blocked: deterministic=True is not supported" in note
    with pa.record_routes() as log:
        out = pa.attention(Q, K, V, structure=structure, gate=GATE, **UNTAKEN)
    assert log.entries[0].notes == (note,)
    near(out, structure=tiles(topk=8), gate=GATE)


def test_a_fault_is_raised_and_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def faulty(*tensors: Any, **rest: Any) -> None:
        calls.append(tensors)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(plan._calls, "polyattn.backends.cpu:sdpa_video_tiles", faulty)
    structure = tiles(topk=3, fallback="dense")
    call._forget()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pa.attention(Q, K, V, structure=structure)
    call._forget()
    assert len(calls) == 1


# every rule of the reference backend is support, or words


def rule(name: str, **given: Any) -> Any:
    return pytest.param(given, id=name)


@pytest.mark.parametrize("given", [
    rule("tiles of other volumes", tile=(2, 3, 5)),
    rule("more tiles asked than there are", topk=64),
    rule("another scale", scale=0.37),
    rule("half precision", dtype=torch.float16),
    rule("float64", dtype=torch.float64),
    rule("fewer KV heads, another value head_dim"),
    rule("not on a device of NVIDIA's", q=Q),
    rule("one row", layout=pa.VideoLayout((1, 1, 1)), rows=1),
])  # fmt: skip
def test_what_the_reference_backend_refuses_runs(given: dict[str, Any]) -> None:
    dtype, rows = given.get("dtype", torch.float32), given.get("rows", ROWS)
    q, k, v, gate = (x[:, :rows].to(dtype) for x in (Q, K, V, GATE))
    structure = pa.VideoTiles(given.get("layout", LAYOUT), given.get("tile", (4, 4, 4)), topk=given.get("topk", 2))
    asked = {"structure": structure, "scale": given.get("scale"), "gate": gate}
    out = pa.attention(q, k, v, **asked)
    torch.testing.assert_close(out.double(), pa.reference_attention(q, k, v, **asked), atol=1e-2, rtol=0)


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"causal": True}, pa.UnsupportedRequest, "VideoTiles does not combine with causal"),
    ({"window": 3}, pa.UnsupportedRequest, "VideoTiles does not combine with window"),
    ({"softcap": 2.0}, pa.UnsupportedRequest, "VideoTiles does not combine with softcap"),
    ({"q": Q[0]}, ValueError, r"\[B,S,H,D\]"),
    ({"q": Q[:1]}, ValueError, "one batch"),
    ({"q": Q[..., :8]}, ValueError, "one head_dim"),
    ({"q": Q[:, :, :3]}, ValueError, "multiple of KV heads"),
    ({"q": Q[:, :120]}, ValueError, "layout: 131 rows .*S=120"),
    ({"k": K[:, :135], "v": V[:, :135]}, ValueError, "layout: .*S=140 and k S=135"),
    ({"q": Q.half()}, TypeError, "one dtype"),
    ({"parallel": pa.distributed.SequenceParallel(ulysses=2)}, pa.UnsupportedRequest, "2 ranks"),
    ({"quant": "fp8"}, pa.UnsupportedRequest, "fp8"),
])  # fmt: skip
def test_what_cannot_be_is_told_in_words(given: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v = (given.pop(name, x) for name, x in (("q", Q), ("k", K), ("v", V)))
    with pytest.raises(error, match=words):
        pa.attention(q, k, v, structure=tiles(), **given)
