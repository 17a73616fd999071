"""Public fault reports, by their rows, on an NPU: through automatic choice, npu:fusion and npu:fia."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import DEVICE, OURS, assert_near, every_backend, exact, qkv, refused
from tests.unit.fault_values import batch, values
from tests.unit.test_fault_cases import EMPTY, MASKS, strided_values

pytestmark = pytest.mark.npu

INF = float("inf")
T, F = True, False
Name = str | None


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16).to(DEVICE)


def assert_rows(out: torch.Tensor, expected: Sequence[Any]) -> None:
    """Every head and channel of row s holds expected[s]; an exact 0 where that is expected."""
    want = torch.tensor(expected, dtype=torch.float64)[..., None, None].expand(out.shape)
    got = out.detach().cpu().double()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-2)
    assert bool((got[want == 0] == 0).all())


@every_backend
def test_1_packed_documents_stay_apart(backend: Name) -> None:
    v = here(values(1, 3, 5, 7, 8, 9))
    for structure in (pa.Packed.from_cu_seqlens([0, 2, 3, 6], max_q=3), pa.Packed.from_lengths([2, 1, 3])):
        out = pa.attention(torch.zeros_like(v), v, v, structure=structure, backend=backend)
        assert_rows(out, [2, 2, 5, 8, 8, 8])
    q, k, v = qkv((6,))
    loop = torch.cat([exact(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in ((0, 2), (2, 3), (3, 6))])
    assert_near(pa.attention(q, k, v, structure=pa.Packed.from_lengths([2, 1, 3]), backend=backend), loop)


@every_backend
def test_4_a_key_mask_is_not_applied_to_the_query(backend: Name) -> None:
    v = here(batch((1, 3, 9), (5, 7, 9)))
    keep = pa.KeyPadding.from_mask([[T, T, F], [T, F, F]], queries="all")
    for queries in (4, 3):
        q = here(torch.zeros(2, queries, 2, 64))
        assert_rows(pa.attention(q, v, v, structure=keep, backend=backend), [[2.0] * queries, [5.0] * queries])
        layer = pa.Attention(2, 64, role="cross", backend=backend)
        assert_rows(layer(q, v, v, pa.KeyPadding.from_mask([[T, T, F], [T, F, F]])), [[2.0] * queries, [5.0] * queries])


@every_backend
def test_5_int64_boundaries_give_the_bits_of_int32_and_impossible_ones_are_refused(backend: Name) -> None:
    v = here(values(1, 2, 3, 10, 20, 30))
    wide, narrow = (
        pa.attention(
            torch.zeros_like(v), v, v, structure=pa.Packed.from_cu_seqlens(torch.tensor([0, 3, 6], dtype=dtype)),
            backend=backend,
        )
        for dtype in (torch.int64, torch.int32)
    )  # fmt: skip
    assert_rows(wide, [2, 2, 2, 20, 20, 20])
    assert torch.equal(wide.cpu(), narrow.cpu())
    for boundaries, error, words in (
        (torch.tensor([0, 3, 2**31 + 5]), ValueError, ("int32", "2147483653")),
        (torch.tensor([0, 4, 8, 12]), ValueError, ("12", "6")),
        (torch.tensor([0, 4, 3, 6]), ValueError, ("non-decreasing", "4 then 3")),
        (torch.tensor([0.0, 3.0, 6.0]), TypeError, ("float32",)),
    ):
        with pytest.raises(error) as refusal:
            pa.attention(v, v, v, structure=pa.Packed.from_cu_seqlens(boundaries), backend=backend)
        assert all(word in str(refusal.value) for word in ("cu_seqlens", *words))


#: A backend and a mask that it takes: `fia` has no biases.
ON_MASKS = [
    pytest.param(backend, plane, id=f"{backend or 'auto'}-{name}")
    for backend in (None, *OURS)
    for name, plane in MASKS.items()
    if backend != "fia" or not plane.dtype.is_floating_point
]


def test_7_a_bias_is_refused_where_the_op_has_none() -> None:
    v = here(batch((2, 4, 8)))
    for plane in (plane for plane in MASKS.values() if plane.dtype.is_floating_point):
        assert "bias" in refused("fia", v[:, :2], v, v, structure=pa.Mask.pairs(plane))


@pytest.mark.parametrize(("backend", "plane"), ON_MASKS)
def test_7_a_row_that_sees_nothing_is_zero_without_nan(backend: Name, plane: torch.Tensor) -> None:
    v, q = here(batch((2, 4, 8))), here(torch.zeros(1, 2, 2, 64))
    for given in (plane, plane.to(DEVICE)):
        out, lse = pa.attention(
            q, torch.zeros_like(v), v, structure=pa.Mask.pairs(given), backend=backend, return_lse=True
        )
        assert_rows(out, [[3.0, 0.0]])
        assert lse[0, :, 0].cpu().tolist() == pytest.approx([math.log(2)] * 2, rel=1e-3)
        assert lse[0, :, 1].cpu().tolist() == [-INF] * 2


@pytest.mark.parametrize("backend", [None, "fusion"], ids=lambda name: name or "auto")
@pytest.mark.parametrize("plane", MASKS.values(), ids=MASKS)
def test_7_gradients_of_a_row_that_sees_nothing_are_finite(backend: Name, plane: torch.Tensor) -> None:
    v, q = here(batch((2, 4, 8))), here(torch.zeros(1, 2, 2, 64))
    leaves = [q.clone().requires_grad_(), torch.zeros_like(v).requires_grad_(), v.clone().requires_grad_()]
    pa.attention(*leaves, structure=pa.Mask.pairs(plane), backend=backend).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
    assert grads[2][0, :, 0, 0].cpu().tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-3)


@every_backend
def test_10_causal_ends_on_the_last_key(backend: Name) -> None:
    for queries, keys, expected in ((2, (1, 2, 3, 4, 5), [2.5, 3.0]), (5, (4, 8), [0, 0, 0, 4, 6])):
        v = here(batch(keys))
        q = here(torch.zeros(1, queries, 2, 64))
        assert_rows(pa.attention(q, v, v, causal=True, backend=backend), [expected])
    v = here(values(1, 2, 3, 4, 5, 4, 8))
    documents = pa.Packed.from_cu_seqlens([0, 2, 4], [0, 5, 7])
    q = here(torch.zeros(4, 2, 64))
    assert_rows(pa.attention(q, v, v, structure=documents, causal=True, backend=backend), [2.5, 3, 4, 6])


@every_backend
@pytest.mark.parametrize("layout", ["transposed", "packed", "step"])
def test_12_a_strided_v_gives_the_contiguous_bits(backend: Name, layout: str) -> None:
    plain, strided = strided_values()[0], strided_values()[1][layout]
    wide = (1, 6, 2, 16)  # the row's D=4 four times: the vendor's ops want multiples of 16
    contiguous = here(plain.repeat(1, 1, 1, 4))
    v = {
        "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": lambda t: torch.stack([t, t, t], dim=2)[:, :, 2],
        "step": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    }[layout](contiguous)
    q = here(torch.zeros(wide))
    assert strided.stride() != plain.stride()
    assert v.stride() != contiguous.stride()
    out = pa.attention(q, q, v, backend=backend)
    want = torch.tensor([[25.0, 26, 27, 28] * 4, [125, 126, 127, 128] * 4])
    torch.testing.assert_close(out[0, 0].cpu().float(), want, rtol=2e-2, atol=0)
    assert torch.equal(out.cpu(), pa.attention(q, q, contiguous, backend=backend).cpu())
    assert torch.equal(v.cpu(), contiguous.cpu())


@every_backend
def test_12_expanded_keys_and_values(backend: Name) -> None:
    q, k, v = qkv((1, 5), (1, 33), kv_heads=1)
    k, v = k.expand(1, 33, 4, 64), v.expand(1, 33, 4, 64)
    assert_near(pa.attention(q, k, v, backend=backend), exact(q, k, v))


@pytest.mark.parametrize("backend", ["fia", "fusion"])
def test_14_another_dtype_takes_another_route_for_that_call_alone(backend: str) -> None:
    layer = pa.Attention(2, 64, backend=f"{backend},auto")
    q, k, v = (t.float() for t in qkv((1, 4), heads=2))
    out = layer(q, k, v)
    if backend == "fia":
        assert layer.last_route.name != "npu:fia"
        assert any("float32" in reason for reason in layer.last_route.reasons["fia"])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), exact(q, k, v), atol=1e-5, rtol=0)
    half = [t.bfloat16() for t in (q, k, v)]
    layer(*half)
    assert layer.last_route.name == f"npu:{backend}"
    with pytest.raises(TypeError, match=r"float32.*float32.*bfloat16"):
        layer(q, k, half[2])


#: An additive mask, and pages of two rows, which these backends refuse though nothing is in them.
REFUSED_EMPTY = {
    ("an empty mask", "fia"): "bias", ("no table", "fia"): "page_size 2", ("no table", "fusion"): "'paged'",
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("case", EMPTY)
def test_16_empty_calls_answer_with_zeros_of_the_right_shape(backend: Name, case: str) -> None:
    q_shape, k_shape, structure = EMPTY[case]
    q, k = here(torch.ones(q_shape)), here(torch.ones(k_shape))
    if (case, backend) in REFUSED_EMPTY:
        assert REFUSED_EMPTY[case, backend] in refused(str(backend), q, k, k, structure=structure and structure())
        return
    out, lse = pa.attention(q, k, k, structure=structure and structure(), backend=backend, return_lse=True)
    assert torch.equal(out.cpu(), torch.zeros(q_shape, dtype=torch.float16))
    assert (out.dtype, out.device) == (q.dtype, q.device)
    assert torch.equal(lse.cpu(), torch.full((*q_shape[:-3], 2, q_shape[-3]), -INF, dtype=torch.float32))


@every_backend
def test_16_empty_documents_among_others(backend: Name) -> None:
    v = here(values(1, 3, 5))
    documents = pa.Packed.from_lengths([0, 2, 1, 0], [2, 1, 0, 0])
    assert_rows(pa.attention(torch.zeros_like(v), v, v, structure=documents, backend=backend), [5, 5, 0])


@pytest.mark.parametrize("backend", ["fia", "fusion"])
def test_35_quantisation_that_the_backend_has_not_is_refused_at_construction(backend: str) -> None:
    with pytest.raises(NotImplementedError) as refusal:
        pa.Attention(2, 64, backend=backend, quant="fp8")
    assert all(word in str(refusal.value) for word in (backend, "npu", "'fp8'"))
    with pytest.raises(ValueError, match=r"'fp9'.*fp8.*int8"):
        pa.Attention(2, 64, backend=backend, quant="fp9")
    q = here(torch.zeros(1, 4, 2, 64))
    skipping = pa.Attention(2, 64, backend=backend, quant=pa.Quant("fp8", skip_layers=(3,)), prefix="blocks.3.attn")
    skipping(q, q, q)
    assert any("fp8 skipped" in note and "layer 3" in note for note in skipping.last_route.notes)


def pages_of_128() -> torch.Tensor:
    """4 pages of 128 rows: page p holds 10p+5 in its even rows and 10p+6 in the odd ones; page 3 holds NaN."""
    rows = torch.tensor([[10.0 * page + 5 + row % 2 for row in range(128)] for page in range(4)])
    rows[3], rows[0, 1:] = float("nan"), float("nan")
    return here(rows[..., None, None].expand(4, 128, 2, 64).contiguous())


@pytest.mark.parametrize("table", [
    [[2, 0, -1]], [[2, 0, 3]], [[2, 0, 99]], torch.tensor([[2, 0, -1]]), torch.tensor([[2, 0, -1]], dtype=torch.int32),
], ids=["missing", "nan page", "past the pool", "int64", "int32"])  # fmt: skip
def test_36_only_the_rows_within_the_length_are_read(table: Any) -> None:
    v, q = pages_of_128(), here(torch.zeros(1, 1, 2, 64))
    out = pa.attention(q, v, v, structure=pa.Paged(table, [129]), backend="fia")
    assert_rows(out, [[(128 * 25.5 + 5) / 129]])


def test_36_a_row_of_length_0_is_zero_and_tables_that_cannot_be_are_refused_by_name() -> None:
    v = pages_of_128()
    out = pa.attention(
        here(torch.zeros(2, 1, 2, 64)), v, v, structure=pa.Paged([[3, 0], [2, 0]], [0, 128]), backend="fia"
    )
    assert_rows(out, [[0.0], [25.5]])
    for table, error, words in (
        ([[2, 7, -1]], ValueError, ("7", "4")),
        ([[2, -1, -1]], ValueError, ("row 0", "slot 1")),
        (torch.tensor([[2.0, 0.0]]), TypeError, ("float32",)),
        (torch.tensor([2, 0]), ValueError, ("[batch, max_pages]", "[2]")),
    ):
        with pytest.raises(error) as refusal:
            pa.attention(v[:1, :1], v, v, structure=pa.Paged(table, [129]), backend="fia")
        assert all(word in str(refusal.value) for word in ("block_table", *words))


@pytest.mark.parametrize("backend", ["fia", "fusion"])
def test_36_pages_of_two_rows_are_refused_with_those_there_are(backend: str) -> None:
    v = here(torch.ones(4, 2, 2, 64))
    reasons = refused(backend, v[:1, :1], v, v, structure=pa.Paged([[2, 0]], [3]))
    assert "page_size 2 not in (128, 256, 384, 512)" in reasons if backend == "fia" else "'paged'" in reasons


@every_backend
@pytest.mark.parametrize("width", [40, 72, 80, 160, 256, 512])
def test_40_any_head_size_is_served_or_padded(backend: Name, width: int) -> None:
    v = here(batch((1, 2, 3, 6), dim=width))
    with pa.record_routes() as log:
        out = pa.attention(torch.zeros_like(v), v, v, backend=backend)
    assert out.shape == v.shape
    assert_rows(out, [[3.0] * 4])
    padded = backend == "fia" and width % 16 != 0
    assert log.entries[0].route == ("pad(npu:fia)" if padded else f"npu:{backend or 'fusion'}")
    short = here(batch(range(1, 15)))
    assert_rows(pa.attention(torch.zeros_like(short), short, short, backend=backend), [[7.5] * 14])
