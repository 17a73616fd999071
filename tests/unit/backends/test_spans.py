"""Spans slots: causal outside, whole spans inside; samples that share their spans run together."""

import pytest
import torch

from polyattn import structures
from polyattn.backends import cpu
from polyattn.compositions.segments import spans as spans_over
from tests.unit.backends.running import DEFAULTS, IMPLEMENTATIONS, assert_equal, batch, expected, run

FULL = {
    "none": [[], []],
    "the same": [[(1, 4)], [(1, 4)]],
    "different": [[(0, 3)], [(2, 4), (4, 7)]],
    "shared by the outer": [[(1, 3)], [(0, 7)], [(1, 3)]],
    "shared by neighbours": [[(2, 6)], [(2, 6)], []],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("queries", [7, 4, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_the_last_positions(implementation, name, queries, causal):
    samples = len(FULL[name])
    assert_equal(implementation, *batch(queries, 7, samples=samples), structures.Spans(FULL[name]), causal=causal)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ranges", [[(0, 4, 0)], [(0, 2, 0), (2, 4, 5)], [(0, 1, 6), (1, 4, 1)]])
def test_queries_at_given_positions(implementation, ranges):
    structure = structures.Spans(FULL["different"], query_ranges=ranges)
    assert_equal(implementation, *batch(4, 7), structure)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_after_everything_asked_may_hold_nan(implementation):
    structure = structures.Spans([[(1, 3)], [(1, 3)]], query_ranges=[(0, 3, 0)])
    q, k, v = batch(3, 7)
    want, _ = expected(q, k, v, structure)
    k[:, 3:] = v[:, 3:] = float("nan")
    torch.testing.assert_close(run(implementation, q, k, v, structure)[0], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("name", "calls"), [("the same", [2, 2, 2]), ("shared by the outer", [2, 2, 2, 1])])
def test_samples_with_the_same_spans_are_one_batch(name, calls):
    q, k, v = batch(7, 7, samples=len(FULL[name]))
    structure = structures.Spans(FULL[name])
    sizes = []

    def dense(q, k, v, out, **call):
        sizes.append(q.shape[0])
        return cpu.sdpa_dense(q, k, v, out, **call)

    meta = structure.bind(q.device, q.shape, k.shape)
    out, lse = spans_over(dense, q, k, v, None, meta=meta, **{**DEFAULTS, "need_lse": True})
    want, want_lse = expected(q, k, v, structure)
    assert sizes == calls
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)
