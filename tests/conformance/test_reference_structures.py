"""The reference on every structure, against values computed by hand and against itself piece by piece."""

import math

import pytest
import torch

from polyattn.errors import UnsupportedRequest
from polyattn.reference import reference_attention
from polyattn.structures import (
    BlockMap,
    KeyPadding,
    Mask,
    Packed,
    Paged,
    PagedKVCache,
    Spans,
    VideoLayout,
    VideoTiles,
)
from tests.conformance.uniform import INF, NAN, answer, normal, rows, zeros

# key padding


def test_cross_attention_keeps_every_query_row():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    v = torch.tensor([[1.0, 3, 9], [5, 7, 9]]).reshape(2, 3, 1, 1)
    for queries in (4, 3):
        structure = KeyPadding.from_mask(mask, queries="all")
        assert answer(zeros(queries, 2), v, structure=structure) == pytest.approx([2.0] * queries + [5.0] * queries)


def test_padded_query_rows_return_zero():
    v = torch.tensor([[1.0, 3, 9], [NAN, NAN, INF]]).reshape(2, 3, 1, 1)
    structure = KeyPadding.from_lengths([2, 0], 3)
    assert answer(zeros(3, 2), v, structure=structure) == [2, 2, 0, 0, 0, 0]
    q = zeros(3, 2)
    _, lse = reference_attention(q, q, v, structure=structure, return_lse=True)
    torch.testing.assert_close(lse[0, 0], torch.tensor([math.log(2), math.log(2), -INF], dtype=torch.float64))


def test_padding_hides_keys_and_moves_nothing():
    structure = KeyPadding.from_ranges([[(1, 2), (3, 5)]], 5)
    assert answer(zeros(5), rows(9, 2, NAN, 4, 6), structure=structure, causal=True) == [0, 2, 0, 3, 4]
    assert answer(zeros(5), rows(9, 2, NAN, 4, 6), structure=structure, window=(1, 0)) == [0, 2, 0, 4, 5]


# mask


def test_rows_without_a_visible_key_are_zero_with_lse_minus_infinity():
    v, half = rows(2, 4, 8), torch.finfo(torch.float16).min
    hidden = torch.tensor([[0, 0, -INF], [-INF, -INF, -INF]])
    lowest = torch.tensor([[0, 0, half], [half, half, half]], dtype=torch.float16)
    for mask in (hidden.isfinite(), hidden, lowest + lowest, lowest):
        q, k = (zeros(n).requires_grad_() for n in (2, 3))
        value = v.clone().requires_grad_()
        out, lse = reference_attention(q, k, value, structure=Mask.pairs(mask), return_lse=True)
        assert out.flatten().tolist() == pytest.approx([3, 0])
        assert lse.flatten().tolist() == pytest.approx([math.log(2), -INF])
        out.sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, value))
        assert value.grad.flatten().tolist() == pytest.approx([0.5, 0.5, 0])


def test_ranks_of_a_mask():
    v = torch.tensor([[1.0, 3, 9], [5, 7, 11]]).reshape(2, 3, 1, 1)
    q = zeros(2, 2)
    assert answer(q, v, structure=Mask(torch.tensor([1, 0, 1]))) == [5, 5, 8, 8]
    assert answer(q, v, structure=Mask(torch.tensor([[1, 0, 0], [0, 1, 1]]))) == [1, 1, 9, 9]
    assert answer(q, v, structure=Mask(torch.tensor([[[1, 0, 0], [0, 1, 1]]]))) == [1, 6, 5, 9]
    assert answer(q, v, structure=Mask.pairs(torch.tensor([[1, 0, 0], [0, 1, 1]]))) == [1, 6, 5, 9]


def test_a_mask_per_head():
    per_head = torch.tensor([[1, 0], [0, 1]]).bool().reshape(1, 2, 1, 2)
    out = reference_attention(torch.zeros(1, 1, 2, 4), torch.zeros(1, 2, 1, 4), rows(3, 7), structure=Mask(per_head))
    assert out.flatten().tolist() == [3, 7]


def test_an_additive_mask_is_added_to_the_scores_and_may_have_a_gradient():
    bias = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    out = reference_attention(zeros(1), zeros(2), rows(0, 4), structure=Mask.pairs(bias))
    assert out.item() == pytest.approx(3)
    out.sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([[-0.75, 0.75]]))


def test_keys_that_nobody_sees_do_not_matter():
    for bad in (NAN, INF, -INF):
        k = zeros(3)
        k[:, 1] = bad
        v = rows(1, bad, 5)
        q = zeros(2).requires_grad_()
        out = reference_attention(q, k, v, structure=Mask.keys(torch.tensor([1, 0, 1])))
        assert out.flatten().tolist() == [3, 3]
        out.sum().backward()
        assert q.grad.isfinite().all()


# packed


def test_documents_stay_apart():
    value = torch.tensor([1.0, 3, 5, 7, 8, 9])[:, None, None].expand(6, 2, 64)
    for structure in (Packed.from_cu_seqlens([0, 2, 3, 6]), Packed.from_lengths([2, 1, 3])):
        out, lse = reference_attention(*[torch.zeros(6, 2, 64)] * 2, value, structure=structure, return_lse=True)
        assert out[:, 1, 5].tolist() == pytest.approx([2, 2, 5, 8, 8, 8])
        assert lse.shape == (2, 6)


def test_documents_equal_a_loop_over_them():
    q, k, v = (normal(6, 2, 8, seed=seed) for seed in range(3))
    for arguments in ({}, {"causal": True}, {"window": 1}):
        loop = [
            reference_attention(q[None, start:end], k[None, start:end], v[None, start:end], **arguments)[0]
            for start, end in ((0, 2), (2, 3), (3, 6))
        ]
        together = reference_attention(q, k, v, structure=Packed.from_lengths([2, 1, 3]), **arguments)
        torch.testing.assert_close(together, torch.cat(loop))


def test_causal_is_anchored_per_document():
    value = torch.tensor([1.0, 2, 3, 4, 5, 4, 8]).reshape(7, 1, 1)
    structure = Packed.from_cu_seqlens([0, 2, 4], [0, 5, 7])
    out = reference_attention(torch.zeros(4, 1, 4), torch.zeros(7, 1, 4), value, structure=structure, causal=True)
    assert out.flatten().tolist() == pytest.approx([2.5, 3, 4, 6])


def test_rows_past_the_last_boundary_return_zero_and_never_matter():
    value = torch.tensor([1.0, 3, NAN, INF]).reshape(4, 1, 1)
    key = torch.cat((torch.zeros(2, 1, 4), torch.full((2, 1, 4), NAN)))
    for structure in (Packed.real_and_pad(2, 4), Packed.from_lengths([1, 0, 1])):
        out, lse = reference_attention(torch.zeros(4, 1, 4), key, value, structure=structure, return_lse=True)
        assert out[2:].eq(0).all()
        assert lse[:, 2:].eq(-INF).all()
    assert out[:2].flatten().tolist() == [1, 3]


def test_a_leading_axis_of_one_is_kept():
    q = normal(1, 5, 2, 8)
    structure = Packed.from_lengths([3, 2])
    out, lse = reference_attention(q, q, q, structure=structure, return_lse=True)
    flat, flat_lse = reference_attention(q[0], q[0], q[0], structure=structure, return_lse=True)
    assert out.shape == (1, 5, 2, 8)
    assert lse.shape == (1, 2, 5)
    assert torch.equal(out[0], flat)
    assert torch.equal(lse[0], flat_lse)


def test_spans_inside_documents_count_from_their_documents_first_key():
    structure = Packed.from_lengths([3, 2], spans=[[(0, 2)], []])
    value = torch.tensor([2.0, 4, 9, 1, 3]).reshape(5, 1, 1)
    out = reference_attention(torch.zeros(5, 1, 4), torch.zeros(5, 1, 4), value, structure=structure)
    assert out.flatten().tolist() == pytest.approx([3, 3, 5, 1, 2])


# spans: knowledge/vllm_omni_tests_and_faults.md, section 2.1; rows are queries, x = visible key


@pytest.mark.parametrize(
    ("full", "ranges", "expected"),
    [
        ([(2, 5)], None, "x....... xx...... xxxxx... xxxxx... xxxxx... xxxxxx.. xxxxxxx. xxxxxxxx"),
        ([(4, 7)], None, "xxxxxxx. xxxxxxx. xxxxxxxx"),
        ([(2, 7)], [(0, 1, 0), (1, 4, 4)], "x....... xxxxxxx. xxxxxxx. xxxxxxx."),
        ([], None, "x....... xx...... xxx..... xxxx.... xxxxx... xxxxxx.. xxxxxxx. xxxxxxxx"),
        ([(0, 8)], None, " ".join(["xxxxxxxx"] * 8)),
    ],
)
def test_what_a_query_sees_beside_spans(full, ranges, expected):
    pattern = expected.split()
    q, k, v = normal(1, len(pattern), 2, 4), normal(1, 8, 2, 4, seed=1), normal(1, 8, 2, 4, seed=2)
    visible = torch.tensor([[cell == "x" for cell in line] for line in pattern])
    out = reference_attention(q, k, v, structure=Spans([full], ranges))
    torch.testing.assert_close(out, reference_attention(q, k, v, structure=Mask.pairs(visible)))


def test_samples_may_have_different_spans():
    v = torch.tensor([[1.0, 3, 5], [1, 3, 5]]).reshape(2, 3, 1, 1)
    assert answer(zeros(3, 2), v, structure=Spans([[(0, 3)], [(0, 2)]])) == pytest.approx([3, 3, 3, 2, 2, 3])


def test_a_window_has_no_meaning_beside_spans():
    with pytest.raises(ValueError, match="window"):
        answer(zeros(3), rows(1, 2, 3), structure=Spans([[(0, 2)]]), window=1)


# paged


def pool(page_size: int = 2) -> PagedKVCache:
    """Four pages of two rows, page p holding 10p+5 and 10p+6; page 3 is NaN."""
    cache = PagedKVCache(4, page_size, 1, 4, torch.float32, "cpu", v_head_dim=1)
    for page in range(3):
        cache.v[page, :, 0, 0] = torch.tensor([10.0 * page + 5, 10.0 * page + 6])
    cache.k[3], cache.v[3] = NAN, NAN
    return cache


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_the_kept_slots_of_the_named_pages_are_read(dtype):
    cache = pool()
    cache.v[0, 1] = NAN
    table = torch.tensor([[2, 0, -1]], dtype=dtype)
    assert reference_attention(zeros(1), cache.k, cache.v, structure=Paged(table, [3])).item() == pytest.approx(56 / 3)
    assert reference_attention(zeros(1), cache.k, cache.v, structure=Paged(table, [0])).item() == 0


@pytest.mark.parametrize(("table", "told"), [([[2, 7, -1]], ("7", "4")), ([[2, -1, -1]], ("row 0", "slot 1"))])
def test_bad_pages_are_refused(table, told):
    cache = pool()
    with pytest.raises(ValueError) as refusal:
        reference_attention(zeros(1), cache.k, cache.v, structure=Paged(table, [3]))
    assert all(word in str(refusal.value) for word in told)


def test_paged_queries_are_the_last_positions_in_every_layout():
    cache = pool()
    structure = Paged([[2, 0], [1, 0]], [3, 2])
    out = reference_attention(zeros(2, 2), cache.k, cache.v, structure=structure, causal=True)
    assert out.flatten().tolist() == pytest.approx([25.5, 56 / 3, 15, 15.5])

    padded = Paged([[2, 0], [1, 0]], [3, 2], [2, 1])
    out, lse = reference_attention(zeros(2, 2), cache.k, cache.v, structure=padded, causal=True, return_lse=True)
    assert out.flatten().tolist() == pytest.approx([25.5, 56 / 3, 15.5, 0])
    assert lse[1, 0, 1] == -INF

    packed, packed_lse = reference_attention(
        torch.zeros(3, 1, 4), cache.k, cache.v, structure=padded, causal=True, return_lse=True
    )
    assert packed.flatten().tolist() == pytest.approx([25.5, 56 / 3, 15.5])
    assert packed_lse.shape == (1, 3)


def test_spans_of_a_paged_row_count_in_its_keys():
    cache = pool()
    structure = Paged([[2, 0]], [3], spans=[[(1, 3)]])
    out = reference_attention(zeros(3), cache.k, cache.v, structure=structure)
    assert out.flatten().tolist() == pytest.approx([25, 56 / 3, 56 / 3])


# block map and video tiles


def test_a_query_block_sees_the_real_rows_of_its_listed_blocks():
    lists = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32).reshape(1, 1, 2, 2)
    counts = torch.tensor([1, 1], dtype=torch.int32).reshape(1, 1, 2)
    v = rows(1, 3, NAN, 5, 7, NAN)
    sizes = torch.tensor([2, 2], dtype=torch.int32)
    assert answer(zeros(3), v, structure=BlockMap(lists, counts, 2, 3, sizes)) == [6, 6, 2]


# video tiles


def test_a_tile_sees_the_tiles_that_its_mean_ranks_highest():
    """Four tiles of one token each, of which one is kept."""
    tiles = VideoTiles(VideoLayout((1, 1, 4)), (1, 1, 1), topk=1)
    q, k, v = rows(1, 2, -3, 4), rows(0, -1, 5, 4), rows(1, 3, 5, 7)
    assert reference_attention(q, k, v, structure=tiles).flatten().tolist() == [5, 5, 3, 5]
    assert reference_attention(q, k, v, structure=tiles, scale=-1.0).flatten().tolist() == [3, 3, 5, 3]


def test_the_lowest_tile_wins_a_tie():
    tiles = VideoTiles(VideoLayout((1, 1, 6)), (1, 1, 2), topk=2)
    assert answer(zeros(6), rows(0, 2, 4, 6, 90, 92), structure=tiles) == [3] * 6


def test_a_gate_adds_the_mean_of_all_tiles_by_their_scores():
    tiles = VideoTiles(VideoLayout((1, 1, 4)), (1, 1, 3), topk=1)  # a tile of three tokens and one of one
    gate = rows(0, 1, 2, -1)
    v = rows(1, 3, 5, 9)  # the tiles' means are 3 and 9, whose mean is 6
    assert answer(zeros(4), v, structure=tiles) == [3, 3, 3, 3]
    assert answer(zeros(4), v, structure=tiles, gate=gate) == [3, 9, 15, -3]


def test_segments_are_seen_by_all_and_see_all():
    layout = VideoLayout((1, 1, 2), prefix=(1,), used=4)  # text, two tokens of video, one more token after them
    tiles = VideoTiles(layout, (1, 1, 1), topk=1)
    assert answer(zeros(5), rows(1, 4, 16, 4, NAN), structure=tiles) == [6.25, 3, 3, 6.25, 0]


def test_what_is_too_short_to_be_sparse_is_dense_or_refused():
    short = {"layout": VideoLayout((1, 1, 4)), "tile": (1, 1, 1), "topk": 1, "min_seq_len": 5}
    v = rows(1, 3, 5, 7)
    assert answer(zeros(4), v, structure=VideoTiles(**short, fallback="dense")) == [4] * 4
    with pytest.raises(UnsupportedRequest, match="4 rows .*min_seq_len=5"):
        answer(zeros(4), v, structure=VideoTiles(**short))


def test_what_video_tiles_do_not_combine_with_is_refused():
    q = torch.zeros(1, 8, 1, 4)
    tiles = VideoTiles(VideoLayout((2, 2, 2)), (2, 2, 2), topk=1)
    for asked in ({"causal": True}, {"window": 1}, {"softcap": 1.0}, {"gate": q, "return_lse": True}):
        with pytest.raises(UnsupportedRequest, match="VideoTiles"):
            reference_attention(q, q, q, structure=tiles, **asked)
    with pytest.raises(ValueError, match=r"gate: .*\[1, 8, 1, 4\].*\[1, 7, 1, 4\]"):
        reference_attention(q, q, q, structure=tiles, gate=q[:, :7])
    with pytest.raises(ValueError, match="gate: only VideoTiles"):
        reference_attention(q, q, q, gate=q)
