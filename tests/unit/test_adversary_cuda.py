"""What a second adversary found in the core beside CUDA's backends: each is one small input and its right outcome."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from polyattn.backends.generic import blocked_dense

Q = torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(0))


class Writing:
    """A dense slot that writes its buffer while it still reads: what it is given must lie apart."""

    def __call__(self, q, k, v, out, **call):
        if out is not None:
            out.zero_()
        result, _ = blocked_dense(q, k, v, None, **call)
        return (result if out is None else out.copy_(result)), None


@pytest.mark.parametrize("alias", [lambda k: k.view_as(k), lambda k: k.detach(), lambda k: k.flip(1).flip(1)])
def test_a_slot_never_writes_what_it_reads_also_on_a_remembered_shape(alias, monkeypatch):
    monkeypatch.setattr("polyattn.plan.load_call", lambda reference: Writing())
    pa.reload_environment()  # no plan is remembered
    k, v = torch.randn_like(Q), torch.randn_like(Q)
    want = pa.reference_attention(Q, k, v).float()
    for out in (torch.empty_like(Q), alias(k)):
        torch.testing.assert_close(pa.attention(Q, k, v, out=out, backend="blocked"), want)
    pa.reload_environment()


def test_a_buffer_whose_elements_share_memory_is_refused():
    with pytest.raises(ValueError, match="share memory"):
        pa.attention(Q, Q.clone(), Q.clone(), out=torch.empty(1, 1, 2, 8).expand(1, 6, 2, 8))


def test_a_slice_of_the_same_storage_is_a_buffer_like_another():
    whole = torch.randn(1, 6, 4, 2, 8)
    q, k, v = (whole[:, :, part] for part in range(3))
    out = pa.attention(q, k, v, out=whole[:, :, 3])
    torch.testing.assert_close(out, pa.attention(q.clone(), k.clone(), v.clone()))


def test_an_empty_choice_in_a_graph_permits_everything_as_it_does_outside():
    attend = torch.compile(lambda q: pa.attention(q, q, q, backend=""), fullgraph=True, backend="eager")
    with pa.use_backend("blocked"), pa.record_routes() as log:
        pa.attention(Q, Q, Q, backend="")
        attend(Q)
    assert {entry.route for entry in log.entries} == {"cpu:sdpa"}


@pytest.mark.parametrize("blank", ["sdpa\x1e", "\x1esdpa", " sdpa\n"])
def test_blanks_around_a_choice_mean_nothing_in_a_graph_either(blank):
    attend = torch.compile(lambda q: pa.attention(q, q, q, backend=blank), fullgraph=True, backend="eager")
    torch.testing.assert_close(attend(Q), pa.attention(Q, Q, Q, backend=blank))


def test_a_number_is_no_flag_in_a_graph_either():
    attend = torch.compile(lambda q: pa.attention(q, q, q, return_lse=1), backend="eager")
    with pytest.raises(Exception, match="return_lse"):
        attend(Q)


def test_rows_of_the_pool_itself_are_not_written_to_it():
    cache = pa.PagedKVCache(4, 4, 1, 8, torch.float32, "cpu")
    rows = cache.k.flatten(0, 1)[:6]
    with pytest.raises(ValueError, match="pool itself"):
        cache.write(rows, rows, torch.arange(1, 7))


def test_strided_boundaries_mean_what_contiguous_ones_do():
    from polyattn.structures.packed import _device_boundaries

    strided = torch.tensor([0, 99, 2, 99, 5, 99], dtype=torch.int32)[::2]
    given = _device_boundaries("cu_q", strided)
    assert given.is_contiguous()
    assert given.tolist() == [0, 2, 5]


def test_an_order_file_of_nothing_but_brackets_is_named(tmp_path, monkeypatch):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    monkeypatch.setenv("POLYATTN_ORDER", str(path))
    pa.reload_environment()
    try:
        with pytest.raises(ValueError, match=r"deep\.json"):
            pa.attention(Q, Q, Q)
    finally:
        monkeypatch.undo()
        pa.reload_environment()
