"""Key padding slots: prefixes, ranges and holes, padded queries, padding that only the device knows."""

import pytest
import torch

from polyattn import structures
from polyattn.backends import cpu, lengths
from tests.unit.backends.running import (
    IMPLEMENTATIONS,
    WITH_LSE,
    assert_equal,
    batch,
    expected,
    gradients,
    run,
)

KEEPS = {
    "prefixes": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]],
    "one common prefix": [[1, 1, 1, 1, 0, 0]] * 3,
    "nothing kept in a row": [[1, 1, 0, 0, 0, 0], [0] * 6],
    "left padding": [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
    "both sides": [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1]],
}
POSITIONS = [{}, {"causal": True}, {"window": (1, 2)}, {"window": (2, 0), "causal": True}, {"window": (None, 1)}]


def padding(name, queries):
    return structures.KeyPadding.from_mask(torch.tensor(KEEPS[name]) > 0, queries=queries)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("call", POSITIONS)
def test_padded_queries_are_zero(implementation, name, call):
    assert_equal(implementation, *batch(6, 6, samples=len(KEEPS[name])), padding(name, "same"), **call)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("queries", [4, 9])
@pytest.mark.parametrize("call", POSITIONS)
def test_every_query_is_kept(implementation, name, queries, call):
    assert_equal(implementation, *batch(queries, 6, samples=len(KEEPS[name])), padding(name, "all"), **call)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("queries", [3, 4])
def test_a_cross_attention_mask_hides_keys_only(implementation, queries):
    """fault_cases row 4."""
    keep = torch.tensor([[True, True, False], [True, False, False]])
    structure = structures.KeyPadding.from_mask(keep, queries="all")
    q, k = torch.zeros(2, queries, 1, 4), torch.zeros(2, 3, 1, 4)
    v = torch.tensor([[1.0, 3, 9], [5, 7, 9]]).reshape(2, 3, 1, 1)
    out, _ = run(implementation, q, k, v, structure)
    assert out.flatten(1).tolist() == [[2.0] * queries, [5.0] * queries]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("call", [{}, {"causal": True}])
@pytest.mark.parametrize("rule", ["same", "all"])
def test_padding_may_hold_nan(implementation, name, call, rule):
    structure = padding(name, rule)
    q, k, v = batch(6, 6, samples=len(KEEPS[name]))
    want, want_lse = expected(q, k, v, structure, **call)
    hidden = torch.tensor(KEEPS[name]) == 0
    k[hidden] = v[hidden] = float("nan")
    if rule == "same":
        q[hidden] = float("inf")
    need = implementation in WITH_LSE
    out, lse = run(implementation, q, k, v, structure, need_lse=need, **call)
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    if need:
        torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)
    for gradient in gradients(lambda *t: run(implementation, *t, structure, **call)[0], q, k, v):
        assert gradient.isfinite().all()


@pytest.fixture
def unknown_to_the_host(monkeypatch):
    """Padding as a device gives it: `keep` alone."""

    def hide(structure, q, k):
        meta = structure.bind(q.device, q.shape, k.shape)
        return type(meta)(meta.keep, meta.queries, None, None, None)

    return hide


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("rule", ["same", "all"])
@pytest.mark.parametrize("call", POSITIONS)
def test_padding_that_only_the_device_knows(implementation, name, rule, call, unknown_to_the_host):
    structure = padding(name, rule)
    q, k, v = batch(6, 6, samples=len(KEEPS[name]))
    want, want_lse = expected(q, k, v, structure, **call)
    hidden = torch.tensor(KEEPS[name]) == 0
    k[hidden] = v[hidden] = float("nan")
    if rule == "same":
        q[hidden] = float("nan")
    meta = unknown_to_the_host(structure, q, k)
    module, prefix = IMPLEMENTATIONS[implementation]
    need = implementation in WITH_LSE
    given = {"causal": False, "window": None, **call}
    out, lse = getattr(module, f"{prefix}_key_padding")(
        q, k, v, None, meta=meta, scale=0.3, softcap=0.0, need_lse=need, options=(), **given
    )
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    if need:
        torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)


def test_neighbours_of_one_length_are_one_call(monkeypatch):
    structure = structures.KeyPadding.from_lengths([3, 3, 5, 3], 6, queries="all")
    q, k, v = batch(4, 6, samples=4)
    calls = []

    def dense(q, k, v, out, **call):
        calls.append((tuple(q.shape), tuple(k.shape)))
        return cpu.sdpa_dense(q, k, v, out, **call)

    meta = structure.bind(q.device, q.shape, k.shape)
    rest = {"scale": 0.3, "softcap": 0.0, "need_lse": False, "options": ()}
    lengths.key_padding(dense, None, q, k, v, None, meta=meta, causal=False, window=None, **rest)
    assert calls == [((2, 4, 4, 8), (2, 3, 2, 8)), ((1, 4, 4, 8), (1, 5, 2, 8)), ((1, 4, 4, 8), (1, 3, 2, 8))]


def test_one_kept_range_is_a_view():
    structure = structures.KeyPadding.from_ranges([[(2, 5)], [(2, 5)]], 6, queries="same")
    q, k, v = batch(6, 6)
    seen = []

    def dense(q, k, v, out, **call):
        seen.extend((q, k, v))
        return cpu.sdpa_dense(q, k, v, out, **call)

    meta = structure.bind(q.device, q.shape, k.shape)
    rest = {"scale": 0.3, "softcap": 0.0, "need_lse": False, "options": ()}
    lengths.key_padding(dense, None, q, k, v, None, meta=meta, causal=True, window=None, **rest)
    assert [t.untyped_storage().data_ptr() for t in seen] == [t.untyped_storage().data_ptr() for t in (q, k, v)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layers_share_what_is_derived(implementation):
    structure = padding("holes", "same")
    q, k, v = batch(6, 6, samples=3)
    run(implementation, q, k, v, structure, causal=True)
    meta = structure.bind(q.device, q.shape, k.shape)
    kept = dict(meta._derived)
    assert kept
    run(implementation, q, k, v, structure, causal=True)
    assert all(meta._derived[key] is value for key, value in kept.items())
    assert structure.builds == 1
