"""Paged slots: only what is read is gathered; batched, packed and padded queries; tables that only the device knows."""

import pytest
import torch

from polyattn import structures
from polyattn.backends import generic
from polyattn.compositions import gather
from tests.unit.backends.running import DEFAULTS, IMPLEMENTATIONS, assert_equal, expected, heads, run

TABLE = [[5, 0, 3], [1, -1, 99], [4, 2, -1], [-7, -1, -1]]
KEYS = (6, 2, 3, 0)
PAGE = 2
POSITIONS = [{}, {"causal": True}, {"window": (1, 0)}]
QUERIES = {"batched": None, "packed": (2, 1, 0, 1), "padded": (3, 0, 1, 2)}


def pools(v_dim=8):
    return heads(6, PAGE, 2, 8, seed=1), heads(6, PAGE, 2, v_dim, seed=2)


def queries(layout):
    return heads(sum(QUERIES["packed"]), 4, 8) if layout == "packed" else heads(4, 3, 4, 8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", QUERIES)
@pytest.mark.parametrize("call", POSITIONS)
def test_rows_see_their_pages(implementation, layout, call):
    structure = structures.Paged(TABLE, KEYS, QUERIES[layout])
    assert_equal(implementation, queries(layout), *pools(v_dim=5), structure, **call)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", QUERIES)
def test_rows_with_spans(implementation, layout):
    structure = structures.Paged(TABLE, KEYS, QUERIES[layout], spans=[[(1, 5)], [], [(0, 3)], []])
    assert_equal(implementation, queries(layout), *pools(), structure)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unread_rows_may_hold_nan(implementation):
    """fault_cases row 36: pages 2, 0 in part, the rest of the pool NaN."""
    v = torch.full((4, 2, 1, 1), float("nan"))
    k = torch.full((4, 2, 1, 8), float("nan"))
    for page, offset in ((2, 0), (2, 1), (0, 0)):
        v[page, offset], k[page, offset] = 10 * page + 5 + offset, 0.0
    q = torch.zeros(1, 1, 1, 8)
    out, _ = run(implementation, q, k, v, structures.Paged([[2, 0, -1]], [3]))
    assert out.item() == pytest.approx(56 / 3)
    assert run(implementation, q, k, v, structures.Paged([[2, 0, -1]], [0]))[0].item() == 0.0


@pytest.mark.parametrize("layout", QUERIES)
@pytest.mark.parametrize("call", POSITIONS)
def test_tables_that_only_the_device_knows(layout, call):
    q, (k, v) = queries(layout), pools()
    structure = structures.Paged(TABLE, KEYS, QUERIES[layout])
    want, want_lse = expected(q, k, v, structure, **call)
    if layout == "padded":
        for row, length in enumerate(QUERIES["padded"]):
            q[row, length:] = float("nan")
    read = {(TABLE[row][j // PAGE], j % PAGE) for row in range(4) for j in range(KEYS[row])}
    for page in range(6):
        for offset in range(PAGE):
            if (page, offset) not in read:
                k[page, offset] = v[page, offset] = float("nan")
    meta = structure.bind(q.device, q.shape, k.shape)
    unknown = type(meta)(meta.block_table, meta.kv_lengths, meta.q_lengths, None, None, None, None)
    buffer = torch.full_like(want, float("nan"))
    out, lse = generic.blocked_paged(q, k, v, buffer, meta=unknown, **{**DEFAULTS, **call, "need_lse": True})
    assert out is buffer
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)


def test_a_page_that_does_not_exist_hides_its_keys():
    k, v = pools()
    q = heads(2, 2, 4, 8)
    table = torch.tensor([[5, 42], [-3, 1]])
    meta = structures.paged.PagedMeta(table.int(), torch.tensor([4, 4]).int(), None, None, None, None, None)
    out, _ = generic.blocked_paged(q, k, v, None, meta=meta, **DEFAULTS)
    want, _ = expected(q, k[[5, 1]], v[[5, 1]])
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)


def test_only_rows_that_are_read_are_gathered_and_their_index_is_made_once():
    structure = structures.Paged(TABLE, KEYS)
    q, (k, v) = queries("batched"), pools()
    seen = []

    def packed(q, k, v, out, *, meta, **call):
        seen.append((q.shape[0], k.shape[0], meta))
        return q.new_zeros(*q.shape[:2], v.shape[-1]), None

    meta = structure.bind(q.device, q.shape, k.shape)
    for _ in range(2):
        gather.pages(packed, q, k, v, None, meta=meta, **DEFAULTS)
    assert [rows[:2] for rows in seen] == [(12, sum(KEYS))] * 2
    assert seen[0][2] is seen[1][2]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_pool_whose_pages_lie_apart(implementation):
    wide_k, wide_v = heads(6, 5, 2, 8, seed=1), heads(6, 5, 2, 8, seed=2)
    structure = structures.Paged(TABLE, KEYS)
    assert_equal(implementation, queries("batched"), wide_k[:, :PAGE], wide_v[:, :PAGE], structure, causal=True)
    both = heads(2, 6, PAGE, 2, 8, seed=3)
    assert_equal(implementation, queries("batched"), both[0], both.transpose(2, 3)[1].transpose(1, 2), structure)
