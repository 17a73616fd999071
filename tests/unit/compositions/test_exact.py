"""Every composition equals the reference over a strict inner slot: nothing dropped, nothing modified, facts true."""

import pytest
import torch

from polyattn import structures
from polyattn.compositions.mask import under_mask
from polyattn.structures.packed_meta import PackedMeta
from tests.unit.backends.running import batch, expected, heads, tokens
from tests.unit.compositions.inners import CALL, Inner, facts_of
from tests.unit.compositions.lowering import assert_exact, features, run

POSITIONS = [{}, {"causal": True}, {"window": (1, 2)}, {"window": (2, 0), "causal": True}]


def padding(*lengths, queries):
    return structures.KeyPadding.from_lengths(lengths, 6, queries=queries)


def ranges(*rows, queries):
    return structures.KeyPadding.from_ranges(rows, 6, queries=queries)


@pytest.mark.parametrize("call", POSITIONS)
@pytest.mark.parametrize("lengths", [([2, 2, 3], None), ([2, 0, 3], [4, 1, 0]), ([3, 3], [5, 5])])
@pytest.mark.parametrize("tail", [0, 2])
def test_loop(lengths, tail, call):
    q, k, v = tokens(sum(lengths[0]) + tail, sum(lengths[1] or lengths[0]) + tail, v_dim=5)
    structure = structures.Packed.from_lengths(*lengths)
    lowered = assert_exact("loop", Inner("dense"), features("dense"), q, k, v, structure, **call)
    assert lowered.q == facts_of(q.unsqueeze(0))
    assert (lowered.structure_kind, lowered.causal, lowered.window) == (
        "dense",
        call.get("causal", False),
        call.get("window"),
    )


def test_loop_with_spans_is_causal():
    structure = structures.Packed.from_lengths([4, 4, 2], spans=[[(1, 3)], [(1, 3)], []])
    lowered = assert_exact("loop", Inner("dense"), features("dense"), *tokens(10, 10), structure)
    assert lowered.causal


@pytest.mark.parametrize("full", [[[(1, 4)], [(1, 4)]], [[(0, 2)], [(3, 6)]], [[], []]])
@pytest.mark.parametrize("queries", [6, 3])
def test_segments(full, queries):
    lowered = assert_exact("segments", Inner("dense"), features("dense"), *batch(queries, 6), structures.Spans(full))
    assert lowered.causal


@pytest.mark.parametrize("layout", ["batched", "packed", "padded"])
@pytest.mark.parametrize(("call", "spans"), [*((call, None) for call in POSITIONS), ({}, [[(0, 3)], [], []])])
def test_gather(layout, call, spans):
    lengths = None if layout == "batched" else (2, 0, 1)
    q = heads(3, 4, 8) if layout == "packed" else heads(3, 2, 4, 8)
    k, v = heads(5, 2, 2, 8, seed=1), heads(5, 2, 2, 3, seed=2)
    structure = structures.Paged([[4, 0], [1, -1], [2, -1]], (3, 2, 1), lengths, spans=spans)
    inner = Inner("packed")
    lowered = assert_exact("gather", inner, features("packed"), q, k, v, structure, **call)
    assert lowered.structure_kind == "packed"
    assert lowered.structure_facts.documents == 3
    assert lowered.structure_facts.spans == (spans is not None)
    assert inner.calls[0]["k"].shape[0] == 6


@pytest.mark.parametrize("structure", [
    padding(3, 6, 0, queries="same"),
    padding(3, 6, 0, queries="all"),
    ranges([(1, 3), (4, 6)], [(0, 6)], [], queries="same"),
    ranges([(1, 3), (4, 6)], [(0, 6)], [], queries="all"),
])  # fmt: skip
def test_pack(structure):
    inner = Inner("packed")
    lowered = assert_exact("pack", inner, features("packed"), *batch(6, 6, samples=3, v_dim=5), structure)
    assert lowered.structure_facts.same_lengths == (structure.queries == "same")
    assert inner.calls[0]["k"].shape[0] == sum(structure.bind(torch.device("cpu"), (3, 6, 4, 8), (3, 6, 2, 8)).lengths)


@pytest.mark.parametrize("call", POSITIONS[1:])
def test_pack_keeps_the_positions_of_a_prefix(call):
    structure = padding(3, 6, 1, queries="same")
    assert_exact("pack", Inner("packed"), features("packed"), *batch(6, 6, samples=3), structure, **call)


def test_what_keeps_nothing_reaches_no_slot():
    inner = Inner("dense")
    out, lse, _ = run("slice", inner, features("dense"), *batch(6, 6), padding(0, 0, queries="all"))
    assert not inner.calls
    assert out.eq(0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("structure", [
    padding(3, 3, 0, queries="same"),
    padding(3, 3, 0, queries="all"),
    ranges([(1, 3), (4, 6)], [(0, 6)], [(2, 4)], queries="same"),
    ranges([(1, 3), (4, 6)], [(0, 6)], [(2, 4)], queries="all"),
])  # fmt: skip
def test_rows(structure):
    assert_exact("rows", Inner("dense"), features("dense"), *batch(6, 6, samples=3, v_dim=5), structure)


@pytest.mark.parametrize("call", POSITIONS[1:])
def test_rows_keep_the_positions_of_a_prefix(call):
    structure = padding(3, 6, 1, queries="same")
    assert_exact("rows", Inner("dense"), features("dense"), *batch(6, 6, samples=3), structure, **call)


@pytest.mark.parametrize("queries", ["same", "all"])
@pytest.mark.parametrize("length", [6, 4, 1])
@pytest.mark.parametrize("call", POSITIONS[:2])
def test_slice(queries, length, call):
    q, k, v = batch(6, 6)
    inner = Inner("dense")
    lowered = assert_exact("slice", inner, features("dense"), q, k, v, padding(length, length, queries=queries), **call)
    seen = inner.calls[0]
    assert (facts_of(seen["q"]), facts_of(seen["k"])) == (lowered.q, lowered.k)
    assert (seen["causal"], seen["window"]) == (lowered.causal, lowered.window)
    assert seen["k"].data_ptr() == k.data_ptr()


def test_slice_shifts_a_window_with_the_keys_it_cuts():
    inner = Inner("dense")
    structure = padding(4, 4, queries="all")
    lowered = assert_exact("slice", inner, features("dense"), *batch(5, 6), structure, window=(3, 1))
    assert lowered.window == (1, 3)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_repeat(kind, kv_heads):
    structure = structures.Packed.from_lengths([2, 3]) if kind == "packed" else None
    q, k, v = tokens(5, 5, kv_heads=kv_heads) if kind == "packed" else batch(5, 5, kv_heads=kv_heads)
    inner, has = Inner(kind, gqa=False), features(kind, gqa=False)
    lowered = assert_exact("repeat", inner, has, q, k, v, structure, causal=True)
    assert facts_of(inner.calls[0]["k"]) == lowered.k


@pytest.mark.parametrize(("dim", "v_dim", "v_free", "want"), [
    (5, 5, True, (8, 8)), (5, 8, True, (8, 8)), (8, 12, True, (8, 16)), (8, 12, False, (16, 16)), (5, 3, False, (8, 8)),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_pad(dim, v_dim, v_free, want, kind):
    structure = structures.Packed.from_lengths([2, 3]) if kind == "packed" else None
    make = tokens if kind == "packed" else batch
    inner = Inner(kind, head_dims={8, 16})
    has = features(kind, head_dims=frozenset({8, 16}), v_dim=v_free)
    lowered = assert_exact("pad", inner, has, *make(5, 5, dim=dim, v_dim=v_dim), structure, causal=True)
    assert (lowered.head_dim, lowered.v_head_dim) == want
    assert facts_of(inner.calls[0]["v"]).shape == lowered.v.shape


MASKABLE = {
    "dense": (None, batch(5, 6)),
    "padded same": (padding(3, 6, queries="same"), batch(6, 6)),
    "padded all": (padding(3, 6, queries="all"), batch(4, 6)),
    "holes": (ranges([(1, 3), (4, 6)], [(0, 2)], queries="same"), batch(6, 6)),
    "prefix": (padding(4, 4, queries="same"), batch(6, 6)),
    "mask": (structures.Mask(torch.arange(60).reshape(2, 5, 6) % 3 > 0), batch(5, 6)),
    "bias": (structures.Mask(torch.linspace(-1, 1, 60).reshape(1, 2, 5, 6).repeat(1, 2, 1, 1)), batch(5, 6)),
    "packed": (structures.Packed.from_lengths([2, 3], [4, 1]), tokens(6, 6)),
    "spans": (structures.Spans([[(1, 4)], []]), batch(5, 6)),
    "packed spans": (structures.Packed.from_lengths([2, 3], [2, 4], spans=[[], [(1, 3)]]), tokens(6, 6)),
}


@pytest.mark.parametrize(("name", "call"), [
    (name, call)
    for name in MASKABLE
    for call in POSITIONS
    if (call or name not in ("dense", "mask", "bias")) and not ("spans" in name and "window" in call)
])  # fmt: skip
def test_mask(name, call):
    structure, tensors = MASKABLE[name]
    inner = Inner("mask", plain=True)
    lowered = assert_exact(
        "mask", inner, features("mask", "bias", causal=False, window=False), *tensors, structure, **call
    )
    kind = "bias" if name == "bias" else "mask"
    assert (lowered.structure_kind, lowered.causal, lowered.window) == (kind, False, None)
    assert lowered.structure_facts.mask_dtype == ("float32" if name == "bias" else "bool")
    seen = inner.calls[0]
    assert facts_of(seen["q"]) == lowered.q
    assert tuple(seen["meta"].tensor.shape) == lowered.structure_facts.mask_shape


def test_mask_of_boundaries_that_only_the_device_knows():
    structure = structures.Packed.from_lengths([2, 3], [4, 1])
    q, k, v = tokens(6, 6)
    known = structure.bind(q.device, q.shape, k.shape)
    unknown = PackedMeta(known.cu_q, known.cu_k, 3, 4, None, None, None)
    want, _ = expected(q, k, v, structure, causal=True, **{name: CALL[name] for name in ("scale", "softcap")})
    k[5:] = v[5:] = q[5:] = float("nan")
    inner = Inner("mask", plain=True)
    out, _ = under_mask(inner, q, k, v, None, meta=unknown, causal=True, window=None, need_lse=False, **CALL)
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)


def test_mask_keeps_padded_query_rows_from_the_inner_slot():
    q, k, v = batch(6, 6)
    want, _, _ = run("mask", Inner("mask"), features("mask"), q, k, v, padding(3, 6, queries="same"))
    q[0, 3:] = float("nan")
    out, _, _ = run("mask", Inner("mask"), features("mask"), q, k, v, padding(3, 6, queries="same"))
    assert torch.equal(out, want)


@pytest.mark.parametrize(("name", "kind", "structure", "make"), [
    ("mask", "mask", structures.Packed.from_lengths([2, 3]), tokens),
    ("mask", "mask", ranges([(1, 3), (4, 6)], [(0, 2)], queries="same"), batch),
    ("mask", "mask", structures.Spans([[(1, 4)], []]), batch),
    ("pack", "packed", padding(3, 5, queries="same"), batch),
])  # fmt: skip
def test_layers_share_what_is_made_for_the_inner_slot(name, kind, structure, make):
    q, k, v = make(5, 5) if make is tokens else make(6, 6)
    inner = Inner(kind, plain=True)
    for _ in range(2):
        run(name, inner, features(kind), q, k, v, structure)
    assert inner.calls[0]["meta"] is inner.calls[1]["meta"]
