"""Publicly reported faults on npu:mindie, npu:laser and npu:quant, one scene a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.mindie_scenes import passed, scenes_of
from polyattn_npu import NpuOptions

pytestmark = pytest.mark.emulated

HALF = torch.float16


def values(rows: list[float], heads: int = 2, dim: int = 64) -> torch.Tensor:
    """v [T,heads,dim] that is constant in each row; beside q = 0 every answer is a plain mean."""
    return torch.tensor(rows, dtype=HALF).reshape(-1, 1, 1).expand(-1, heads, dim).contiguous()


def answered(q: Any, k: Any, v: Any, **asked: Any) -> torch.Tensor:
    """The first entry of each row of the first head, by npu:mindie unless another is asked for."""
    out = pa.attention(q.npu(), k.npu(), v.npu(), **({"backend": "mindie"} | asked))
    assert out.device.type == "npu"
    assert not out.cpu().isnan().any()
    return out.cpu()[..., 0, 0].float()


def same(found: torch.Tensor, rows: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float32), atol=2e-2, rtol=0)


def scene_1_documents_stay_apart() -> None:
    v = values([1, 3, 5, 7, 8, 9])
    ends = torch.tensor([0, 2, 3, 6])
    same(answered(v * 0, v * 0, v, structure=pa.Packed.from_cu_seqlens(ends)), [2, 2, 5, 8, 8, 8])
    q, k = (torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(0)).half() for _ in range(2))
    out = pa.attention(q.npu(), k.npu(), v.npu(), structure=pa.Packed.from_cu_seqlens(ends), backend="mindie").cpu()
    for start, end in ((0, 2), (2, 3), (3, 6)):
        alone = pa.reference_attention(*(t[None, start:end] for t in (q, k, v)))[0]
        torch.testing.assert_close(out[start:end].double(), alone.double(), atol=2e-2, rtol=0)


def scene_1_one_packed_document_is_all_that_laser_takes() -> None:
    v = values([1.0] * 6).npu()
    told = pa.explain(v, v, v, structure=pa.Packed.from_lengths([2, 1, 3]), backend="laser")
    assert "3 documents" in str(told)
    assert "npu:laser" in str(told)


def scene_4_a_key_mask_is_not_the_queries() -> None:
    v = torch.stack([values([1, 3, 9]), values([5, 7, 9])])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    kept = pa.KeyPadding.from_mask(mask, queries="all")
    for queries in (4, 3):
        q = torch.zeros(2, queries, 2, 64, dtype=HALF)
        same(answered(q, v * 0, v, structure=kept), [[2.0] * queries, [5.0] * queries])
    layer = pa.Attention(2, 64, role="cross", backend="mindie")
    out = layer((v * 0).npu(), (v * 0).npu(), v.npu(), pa.KeyPadding.from_mask(mask))
    same(out.cpu()[..., 0, 0].float(), [[2.0] * 3, [5.0] * 3])


def scene_5_boundaries_of_64_bits_and_bad_ones() -> None:
    v = values([1, 2, 3, 10, 20, 30])
    wide, narrow = (
        answered(v * 0, v * 0, v, structure=pa.Packed.from_cu_seqlens(torch.tensor([0, 3, 6], dtype=dtype)))
        for dtype in (torch.int64, torch.int32)
    )
    same(wide, [2, 2, 2, 20, 20, 20])
    assert torch.equal(wide, narrow)
    rows = v[:4]
    for ends, kind, words in (
        (torch.tensor([0, 3, 2**31 + 5]), ValueError, "int32"),
        (torch.tensor([0, 4, 8, 12]), ValueError, "12"),
        (torch.tensor([0, 4, 3, 6]), ValueError, "cu_seqlens"),
        (torch.tensor([0.0, 3.0, 6.0]), TypeError, "float32"),
    ):
        with pytest.raises(kind) as told:
            answered(rows * 0, rows * 0, rows, structure=pa.Packed.from_cu_seqlens(ends))
        assert "cu_seqlens" in str(told.value)
        assert words in str(told.value)


def scene_7_a_row_that_sees_nothing_is_zero() -> None:
    v = values([2, 4, 8])[None]
    q = torch.zeros(1, 2, 2, 64, dtype=HALF)
    keep = torch.tensor([[True, True, False], [False, False, False]])
    same(answered(q, v * 0, v, structure=pa.Mask.pairs(keep)), [[3.0, 0.0]])
    for hidden in (float("-inf"), torch.finfo(HALF).min):
        bias = torch.zeros(2, 3, dtype=HALF).masked_fill(~keep, hidden)
        told = pa.explain(q.npu(), (v * 0).npu(), v.npu(), structure=pa.Mask.pairs(bias), backend="mindie")
        assert told.chosen is None  # MindIE-SD would take 0 for hidden and -inf for kept
        assert "'bias'" in str(told)


def scene_10_causal_is_bottom_right() -> None:
    for queries, rows, expected in ((2, [1, 2, 3, 4, 5], [2.5, 3.0]), (5, [4, 8], [0, 0, 0, 4, 6])):
        v = values(rows)[None]
        q = torch.zeros(1, queries, 2, 64, dtype=HALF)
        same(answered(q, v * 0, v, causal=True), [expected])
    v = values([1, 2, 3, 4, 5, 4, 8])
    documents = pa.Packed.from_cu_seqlens(torch.tensor([0, 2, 4]), torch.tensor([0, 5, 7]))
    same(answered(torch.zeros(4, 2, 64, dtype=HALF), v * 0, v, structure=documents, causal=True), [2.5, 3, 4, 6])


def scene_12_strides_do_not_matter() -> None:
    s, h, d = torch.meshgrid(torch.arange(6), torch.arange(2), torch.arange(4), indexing="ij")
    plain = (100 * h + 10 * s + d).to(HALF)[None]
    transposed = plain.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.zeros(1, 6, 3, 2, 4, dtype=HALF)
    fused[:, :, 2] = plain
    stepped = torch.zeros(1, 6, 2, 8, dtype=HALF)
    stepped[..., ::2] = plain
    q = torch.zeros(1, 6, 2, 4, dtype=HALF).npu()
    want = pa.attention(q, q, plain.npu(), backend="mindie").cpu()
    torch.testing.assert_close(want[0, 0].float(), torch.tensor([[25.0, 26, 27, 28], [125, 126, 127, 128]]))
    for view in (transposed.npu(), fused.npu()[:, :, 2], stepped.npu()[..., ::2]):
        before = view.cpu().clone()
        assert torch.equal(pa.attention(q, q, view, backend="mindie").cpu(), want)
        assert torch.equal(view.cpu(), before)


def scene_14_float32_and_mixed_dtypes() -> None:
    q = torch.randn(1, 4, 2, 64, generator=torch.Generator().manual_seed(0))
    layer = pa.Attention(2, 64, backend="mindie")
    out = layer(q.npu(), q.npu(), q.npu())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), pa.reference_attention(q, q, q).double(), atol=1e-5, rtol=0)
    assert layer(*[q.bfloat16().npu()] * 3).dtype == torch.bfloat16
    with pytest.raises(TypeError) as told:
        layer(q.npu(), q.npu(), q.bfloat16().npu())
    assert str(told.value).count("float32") >= 2
    assert "bfloat16" in str(told.value)
    assert "float32 not in" in str(pa.explain(q.npu(), q.npu(), q.npu(), backend="laser"))


def scene_16_nothing_to_attend_to() -> None:
    def shape(q: tuple[int, ...], k: tuple[int, ...], **asked: Any) -> torch.Tensor:
        tensors = [torch.zeros(size, dtype=HALF).npu() for size in (q, k, k)]
        return pa.attention(*tensors, backend="mindie", **asked).cpu()

    assert tuple(shape((0, 4, 2, 16), (0, 4, 2, 16)).shape) == (0, 4, 2, 16)
    assert tuple(shape((2, 0, 2, 16), (2, 3, 2, 16)).shape) == (2, 0, 2, 16)
    assert bool(shape((1, 3, 2, 16), (1, 0, 2, 16)).eq(0).all())
    for ends in ([0], [0, 0]):
        packed = pa.Packed.from_cu_seqlens(torch.tensor(ends))
        assert tuple(shape((0, 2, 16), (0, 2, 16), structure=packed).shape) == (0, 2, 16)
        assert bool(shape((3, 2, 16), (3, 2, 16), structure=packed).eq(0).all())


def scene_35_a_quantised_request_is_never_ignored() -> None:
    q = torch.zeros(1, 4, 2, 64, dtype=HALF).npu()
    for backend in ("mindie", "laser", "quant"):
        with pytest.raises(NotImplementedError) as told:
            pa.attention(q, q, q, quant="fp8", backend=backend)
        assert f"npu:{backend}" in str(told.value)
        assert "fp8" in str(told.value)
        assert backend != "quant" or "quant_attention" in str(told.value)
    with pytest.raises(NotImplementedError, match="int8"):
        pa.attention(q, q, q, quant="int8", backend="quant")
    with pytest.raises(ValueError, match="fp9"):
        pa.attention(q, q, q, quant="fp9")
    assert pa.attention(q, q, q, quant="auto", backend="mindie").shape == q.shape


def scene_36_pages_are_other_backends() -> None:
    cache = pa.PagedKVCache(4, 2, 2, 64, HALF, "npu")
    pages = pa.Paged(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    q = torch.zeros(1, 1, 2, 64, dtype=HALF).npu()
    for backend in ("mindie", "laser", "quant"):
        told = pa.explain(q, cache.k, cache.v, structure=pages, backend=backend)
        assert "'paged' is not supported" in next(why for name, _, why in told.rows() if name == f"npu:{backend}")


def scene_40_head_sizes() -> None:
    for size in (40, 72, 80, 160, 256, 512):
        v = values([1, 2, 3, 6], dim=size)[None]
        out = pa.attention((v * 0).npu(), (v * 0).npu(), v.npu(), backend="mindie")
        assert out.shape == v.shape
        same(out.cpu()[..., 0, 0].float(), [[3.0] * 4])
    v = torch.zeros(1, 2048, 1, 160, dtype=HALF).npu()
    with pytest.raises(ValueError, match="head_dim 160 not in"):
        pa.attention(v, v, v, options=NpuOptions(op_type="ascend_laser_attention"), backend="laser")


@pytest.mark.parametrize("scene", scenes_of(globals()))
def test_row(scene: str) -> None:
    passed(__name__, scene, soc="A2", lint=True)
