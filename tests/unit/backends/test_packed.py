"""Packed slots: documents apart, equal ones batched, spans, rows past the boundaries, boundaries on the device."""

import pytest
import torch

from polyattn import structures
from polyattn.backends import cpu, generic
from polyattn.compositions.loop import document_loop
from tests.unit.backends.running import (
    DEFAULTS,
    IMPLEMENTATIONS,
    WITH_LSE,
    assert_equal,
    expected,
    heads,
    run,
    tokens,
)

LENGTHS = {
    "one": ([5], None),
    "uneven": ([2, 1, 4], None),
    "equal": ([3, 3, 3], None),
    "runs": ([2, 2, 5, 5, 2], None),
    "cross": ([2, 3, 3], [4, 1, 1]),
    "no queries": ([2, 0, 3], [2, 4, 3]),
    "no keys": ([2, 3, 1], [2, 0, 4]),
    "more queries than keys": ([5, 5, 2], [2, 2, 5]),
}
POSITIONS = [{}, {"causal": True}, {"window": (1, 0)}, {"window": (0, 2)}]


def packed(name, tail=0, **given):
    lengths_q, lengths_k = LENGTHS[name]
    structure = structures.Packed.from_lengths(lengths_q, lengths_k, **given)
    return structure, tokens(sum(lengths_q) + tail, sum(lengths_k or lengths_q) + tail, v_dim=5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("call", POSITIONS)
def test_documents_stay_apart(implementation, name, tail, call):
    structure, tensors = packed(name, tail)
    assert_equal(implementation, *tensors, structure, **call)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_three_documents_by_hand(implementation):
    """fault_cases row 1 and the packed case of row 10."""
    q = torch.zeros(6, 2, 64)
    v = torch.tensor([1.0, 3, 5, 7, 8, 9]).reshape(6, 1, 1).expand(6, 2, 64)
    out, _ = run(implementation, q, q, v, structures.Packed.from_lengths([2, 1, 3]))
    assert out[:, 1, 63].tolist() == pytest.approx([2, 2, 5, 8, 8, 8])
    q, k = torch.zeros(4, 1, 8), torch.zeros(7, 1, 8)
    v = torch.tensor([1.0, 2, 3, 4, 5, 4, 8]).reshape(7, 1, 1)
    out, _ = run(implementation, q, k, v, structures.Packed.from_lengths([2, 2], [5, 2]), causal=True)
    assert out.flatten().tolist() == pytest.approx([2.5, 3, 4, 6])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spans", [[[(0, 2)], [], [(1, 3)]], [[], [(0, 1)], [(0, 1), (2, 4)]]])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_with_spans(implementation, spans, cross, causal):
    lengths = ([2, 1, 3], [2, 2, 5]) if cross else ([2, 2, 4], None)
    structure = structures.Packed.from_lengths(*lengths, spans=spans)
    q, k, v = tokens(sum(lengths[0]) + 1, sum(lengths[1] or lengths[0]))
    assert_equal(implementation, q, k, v, structure, causal=causal)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_no_query_of_its_document_sees_may_hold_nan(implementation):
    structure = structures.Packed.from_lengths([2, 0, 1], [4, 2, 3])
    q, k, v = tokens(5, 11)
    call = {"window": (1, 0)}
    want, _ = expected(q, k, v, structure, **call)
    unseen = [0, 4, 5, 6, 9, 10]  # before the windows, a document without queries, the tail
    k[unseen] = v[unseen] = float("nan")
    q[3:] = float("nan")
    torch.testing.assert_close(run(implementation, q, k, v, structure, **call)[0], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_real_and_pad_is_one_document(implementation):
    structure = structures.Packed.real_and_pad(3, 5)
    q, k, v = tokens(5, 5)
    assert_equal(implementation, q, k, v, structure)
    assert run(implementation, q, k, v, structure)[0][3:].eq(0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_new_lengths_are_seen_at_once(implementation):
    structure = structures.Packed.from_lengths([2, 4], capacity=(3, 6))
    q, k, v = tokens(6, 6)
    run(implementation, q, k, v, structure)
    for lengths in ([4, 2], [1, 1, 4], [6]):
        structure.update_(lengths)
        want, _ = expected(q, k, v, structures.Packed.from_lengths(lengths))
        torch.testing.assert_close(run(implementation, q, k, v, structure)[0], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("call", POSITIONS)
def test_boundaries_that_only_the_device_knows(name, call):
    structure, (q, k, v) = packed(name, tail=2)
    want, want_lse = expected(q, k, v, structure, **call)
    k[-2:] = v[-2:] = q[-2:] = float("nan")
    meta = structure.bind(q.device, q.shape, k.shape)
    unknown = type(meta)(meta.cu_q, meta.cu_k, meta.max_q, meta.max_k, None, None, None)
    buffer = torch.full_like(want, float("nan"))
    out, lse = generic.blocked_packed(q, k, v, buffer, meta=unknown, **{**DEFAULTS, **call, "need_lse": True})
    assert out is buffer
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("call", POSITIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
def test_a_document_of_unknown_ends_keeps_its_poison(call, poison, poisoned):
    """DESIGN 4.5, where documents share a product: neither answers nor gradients of the others feel it."""
    structure, tensors = packed("uneven")
    clean = [tensor.clone().requires_grad_() for tensor in tensors]
    meta = structure.bind(clean[0].device, clean[0].shape, clean[1].shape)
    unknown = type(meta)(meta.cu_q, meta.cu_k, meta.max_q, meta.max_k, None, None, None)
    want, want_lse = expected(*clean, structure, **call)
    dirty = dict(zip("qkv", (tensor.clone() for tensor in tensors), strict=True))
    dirty[poisoned][3:] = poison  # the last of three documents
    given = [tensor.requires_grad_() for tensor in dirty.values()]
    out, lse = generic.blocked_packed(*given, None, meta=unknown, **{**DEFAULTS, **call, "need_lse": True})
    torch.testing.assert_close(out[:3], want[:3], atol=1e-9, rtol=0)
    torch.testing.assert_close(lse[:, :3], want_lse[:, :3].float(), atol=1e-5, rtol=1e-5)
    assert out[3:].isnan().all(), "and it is not hidden in its own"
    for mine, theirs in zip(
        torch.autograd.grad(out[:3].sum(), given), torch.autograd.grad(want[:3].sum(), clean), strict=True
    ):
        torch.testing.assert_close(mine[:3], theirs[:3], atol=1e-9, rtol=0)


@pytest.mark.parametrize("lse", [False, True])
def test_runs_of_equal_documents_are_one_call_on_views(lse):
    structure = structures.Packed.from_lengths([4] * 6 + [2, 2, 3])
    qkv = heads(31, 3, 4, 8)
    q, k, v = qkv.unbind(1)
    calls = []

    def dense(q, k, v, out, **call):
        assert q.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
        calls.append(tuple(q.shape[:2]))
        return cpu.sdpa_dense(q, k, v, out, **call)

    meta = structure.bind(q.device, q.shape, k.shape)
    out, row_lse = document_loop(dense, q, k, v, None, meta=meta, **{**DEFAULTS, "need_lse": lse})
    assert calls == [(6, 4), (2, 2), (1, 3)]
    want, want_lse = expected(q, k, v, structure)
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    if lse:
        torch.testing.assert_close(row_lse, want_lse.float(), atol=1e-5, rtol=1e-5)


def test_equal_documents_alone_are_not_copied():
    structure = structures.Packed.from_lengths([4] * 3)
    q, k, v = tokens(12, 12)
    made = []

    def dense(q, k, v, out, **call):
        made.append(cpu.sdpa_dense(q, k, v, out, **call))
        return made[-1]

    meta = structure.bind(q.device, q.shape, k.shape)
    out, _ = document_loop(dense, q, k, v, None, meta=meta, **DEFAULTS)
    assert out.data_ptr() == made[0][0].data_ptr()


@pytest.mark.parametrize("implementation", WITH_LSE)
def test_no_documents_at_all(implementation):
    structure = structures.Packed.from_lengths([])
    out, lse = run(implementation, *tokens(3, 2), structure, need_lse=True)
    assert out.eq(0).all()
    assert lse.shape == (4, 3)
    assert lse.isneginf().all()
