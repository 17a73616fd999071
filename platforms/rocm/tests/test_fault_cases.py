"""Public fault reports of wrong values, through each of ROCm's own backends on its emulator; named by row.

on_device/test_fault_cases.py runs the same scenes on a device.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.rocm.tests.emulated import BACKENDS, passed, scenes_of
from tests.unit.fault_values import batch, values

pytestmark = pytest.mark.emulated

INF = float("inf")
T, F = True, False
HALF = torch.bfloat16
#: Where the scenes' tensors are.
HERE = torch.device("cpu")


def attend(backend: str, q: Any, k: Any, v: Any, **asked: Any) -> Any:
    """By the backend; where it refuses, which must have a reason, by whoever serves the call instead."""
    try:
        return pa.attention(q, k, v, backend=backend, **asked)
    except pa.UnsupportedRequest as refusal:
        if not all(refusal.reasons[backend]):
            raise
    return pa.attention(q, k, v, backend=f"{backend},auto", **asked)


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(HERE, HALF)


def rows(out: torch.Tensor, expected: Any) -> None:
    """Every head and channel of row s holds expected[s]; an exact 0 where that is expected."""
    want = torch.tensor(expected, dtype=torch.float64)[..., None, None].expand(out.shape)
    got = out.detach().cpu().double()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-2)
    assert (got[want == 0] == 0).all()


def near(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.cpu().double(), want.cpu().double(), atol=4e-2, rtol=0)


def scene_1_packed_documents_stay_apart(backend: str) -> None:
    v = half(values(1, 3, 5, 7, 8, 9))
    on_device = pa.Packed.from_cu_seqlens(torch.tensor([0, 2, 3, 6]), max_q=3)
    for structure in (on_device, pa.Packed.from_lengths([2, 1, 3])):
        rows(attend(backend, v * 0, v, v, structure=structure), [2, 2, 5, 8, 8, 8])
    q, k, v = (half(torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(seed))) for seed in range(3))
    loop = [pa.reference_attention(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in ((0, 2), (2, 3), (3, 6))]
    near(attend(backend, q, k, v, structure=pa.Packed.from_lengths([2, 1, 3])), torch.cat(loop))


def scene_4_a_key_mask_is_not_applied_to_the_query(backend: str) -> None:
    v = half(batch((1, 3, 9), (5, 7, 9)))
    keep = pa.KeyPadding.from_mask([[T, T, F], [T, F, F]], queries="all")
    for queries in (4, 3):
        q = half(torch.zeros(2, queries, 2, 64))
        rows(attend(backend, q, v, v, structure=keep), [[2.0] * queries, [5.0] * queries])
        layer = pa.Attention(2, 64, role="cross", backend=backend)
        rows(layer(q, v, v, pa.KeyPadding.from_mask([[T, T, F], [T, F, F]])), [[2.0] * queries, [5.0] * queries])


def scene_5_int64_boundaries_give_the_bits_of_int32(backend: str) -> None:
    v = half(values(1, 2, 3, 10, 20, 30))
    wide, narrow = (
        attend(backend, v * 0, v, v, structure=pa.Packed.from_cu_seqlens(torch.tensor([0, 3, 6], dtype=dtype)))
        for dtype in (torch.int64, torch.int32)
    )
    rows(wide, [2, 2, 2, 20, 20, 20])
    assert torch.equal(wide, narrow)
    for boundaries, error, word in (([0, 3, 2**31 + 5], ValueError, "int32"), ([0, 4, 3, 6], ValueError, "non-decr")):
        with pytest.raises(error, match=word):
            attend(backend, v, v, v, structure=pa.Packed.from_cu_seqlens(torch.tensor(boundaries)))


def scene_7_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity(backend: str) -> None:
    v = half(batch((2, 4, 8)))
    plane = torch.tensor([[T, T, F], [F, F, F]])
    q = half(torch.zeros(1, 2, 2, 64))
    out, lse = attend(backend, q, v * 0, v, structure=pa.Mask.pairs(plane), return_lse=True)
    rows(out, [[3.0, 0.0]])
    assert lse[0, :, 0].tolist() == pytest.approx([math.log(2)] * 2, rel=1e-3)
    assert lse[0, :, 1].tolist() == [-INF] * 2
    hidden = half(batch((2, 4, 8), (2, 4, 8)))
    out, lse = attend(
        backend, hidden * 0, hidden * 0, hidden, structure=pa.KeyPadding.from_lengths([3, 0], 3), return_lse=True
    )
    rows(out, [[14 / 3] * 3, [0.0] * 3])
    assert lse[1].isneginf().all()


def scene_7_gradients_through_rows_that_see_nothing_are_finite(backend: str) -> None:
    q, k, v = (half(torch.randn(5, 2, 64)).requires_grad_() for _ in range(3))
    out = attend(backend, q, k, v, structure=pa.Packed.from_lengths([2, 1, 0, 2], [2, 0, 2, 1]))
    out.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))
    assert k.grad is not None
    assert k.grad[2:4].eq(0).all()  # of the document without queries


def scene_10_causal_ends_on_the_last_key(backend: str) -> None:
    for queries, keys, expected in ((2, (1, 2, 3, 4, 5), [2.5, 3.0]), (5, (4, 8), [0, 0, 0, 4, 6])):
        v = half(batch(keys))
        q = half(torch.zeros(1, queries, 2, 64))
        rows(attend(backend, q, v, v, causal=True), [expected])
    v = half(values(1, 2, 3, 4, 5, 4, 8))
    documents = pa.Packed.from_cu_seqlens([0, 2, 4], [0, 5, 7])
    rows(attend(backend, half(torch.zeros(4, 2, 64)), v, v, structure=documents, causal=True), [2.5, 3, 4, 6])


def scene_10_causal_over_square_documents_and_empty_ones(backend: str) -> None:
    v = half(values(1, 3, 5, 7, 8))
    documents = pa.Packed.from_lengths([0, 2, 0, 3, 0])
    out, lse = attend(backend, v * 0, v * 0, v, structure=documents, causal=True, return_lse=True)
    rows(out, [1, 2, 5, 6, 20 / 3])
    want = [math.log(1), math.log(2), math.log(1), math.log(2), math.log(3)]
    assert lse[0].tolist() == pytest.approx(want, abs=1e-3)


def scene_12_a_strided_v_gives_the_contiguous_bits(backend: str) -> None:
    s, h, d = torch.meshgrid(torch.arange(6.0), torch.arange(2.0), torch.arange(8.0), indexing="ij")
    v = half((16 * h + 2 * s + d)[None])  # exact in bfloat16
    packed, wide = half(torch.zeros(1, 6, 3, 2, 8)), half(torch.zeros(1, 6, 2, 16))
    packed[:, :, 2], wide[..., ::2] = v, v
    q = half(torch.zeros(1, 6, 2, 8))
    for given in (v.transpose(1, 2).contiguous().transpose(1, 2), packed[:, :, 2], wide[..., ::2]):
        assert given.stride() != v.stride()
        out = attend(backend, q, q, given)
        near(out[0, 0, 0], torch.arange(5.0, 13.0))
        assert torch.equal(out, attend(backend, q, q, v))
        assert torch.equal(given, v)
    draw = torch.Generator().manual_seed(0)
    q = half(torch.randn(1, 5, 4, 64, generator=draw))
    k, v = (half(torch.randn(1, 33, 1, 64, generator=draw)).expand(1, 33, 4, 64) for _ in "kv")
    near(attend(backend, q, k, v), pa.reference_attention(q, k.contiguous(), v.contiguous()))


def scene_16_empty_calls_answer_with_zeros_of_the_right_shape(backend: str) -> None:
    for q_shape, k_shape, structure in (
        ((0, 4, 2, 16), (0, 4, 2, 16), None),
        ((2, 0, 2, 16), (2, 3, 2, 16), None),
        ((1, 3, 2, 16), (1, 0, 2, 16), None),
        ((0, 2, 16), (0, 2, 16), pa.Packed.from_cu_seqlens([0])),
        ((0, 2, 16), (0, 2, 16), pa.Packed.from_cu_seqlens([0, 0])),
    ):
        q, k = half(torch.ones(q_shape)), half(torch.ones(k_shape))
        out, lse = attend(backend, q, k, k, structure=structure, return_lse=True)
        assert torch.equal(out, torch.zeros_like(q))
        assert torch.equal(lse.cpu(), torch.full((*q_shape[:-3], 2, q_shape[-3]), -INF))
    v = half(values(1, 3, 5))
    documents = pa.Packed.from_lengths([0, 2, 1, 0], [2, 1, 0, 0])
    rows(attend(backend, v * 0, v, v, structure=documents), [5, 5, 0])


def scene_35_quantisation_that_it_lacks_is_refused_at_construction(backend: str) -> None:
    with pytest.raises(NotImplementedError) as refusal:
        pa.Attention(2, 64, backend=backend, quant="fp8")
    assert all(word in str(refusal.value) for word in ("cpu", "'fp8'", backend))


def scene_36_pages_that_are_not_there_are_hidden(backend: str) -> None:
    nan = float("nan")
    pool = torch.tensor([[5.0, nan], [15, 16], [25, 26], [nan, nan]])[..., None, None].expand(4, 2, 2, 64).contiguous()
    v = half(pool)
    q = half(torch.zeros(1, 1, 2, 64))
    for table in ([[2, 0, -1]], torch.tensor([[2, 0, 99]]), torch.tensor([[2, 0, 3]], dtype=torch.int32)):
        rows(attend(backend, q, v, v, structure=pa.Paged(table, [3])), [[56 / 3]])
    two = half(torch.zeros(2, 1, 2, 64))
    rows(attend(backend, two, v, v, structure=pa.Paged([[3, 0], [2, 0]], [0, 3])), [[0.0], [56 / 3]])
    with pytest.raises(ValueError, match=r"(?s)block_table.*7.*4"):
        attend(backend, q, v, v, structure=pa.Paged([[2, 7, -1]], [3]))


def scene_36_pages_of_the_size_that_it_reads(backend: str) -> None:
    cache = pa.PagedKVCache(3, 128, 1, 64, HALF, HERE)
    keys = half(torch.randn(200, 1, 64, generator=torch.Generator().manual_seed(1)))
    cache.write(keys, keys, torch.cat((torch.arange(256, 384), torch.arange(72))).to(HERE))
    q, structure = half(torch.randn(1, 3, 2, 64)), pa.Paged([[2, 0]], [200])
    out = attend(backend, q, cache.k, cache.v, structure=structure, causal=True)
    near(out, pa.reference_attention(q, cache.k, cache.v, structure=structure, causal=True))


def scene_40_any_head_size_is_served_or_refused_with_those_there_are(backend: str) -> None:
    for width in (40, 72, 80, 160, 256, 512):
        v = half(batch((1, 2, 3, 6), dim=width))
        out = attend(backend, v * 0, v, v)
        assert out.shape == v.shape
        rows(out, [[3.0] * 4])
    q = half(torch.zeros(1, 4, 2, 512))
    with pytest.raises(ValueError, match=r"head_dim 512 not in \(8 to 256 in steps of 8\)"):
        pa.attention(q, q, q, backend=backend)
    v = half(batch(range(1, 15)))
    rows(attend(backend, v * 0, v, v), [[7.5] * 14])


@pytest.mark.parametrize("scene", scenes_of(globals()))
@pytest.mark.parametrize("backend", BACKENDS)
def test_fault_case(backend: str, scene: str) -> None:
    passed(__name__, scene, backend)
