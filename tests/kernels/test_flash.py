"""The flash kernel against the reference: every way of saying who sees whom, any sizes and strides, nothing leaks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.backends import triton_flash
from polyattn.door.request import Request, TensorFacts
from polyattn.kernels import flash
from polyattn.kernels.flash import Scoring, Visibility, batched, packed
from polyattn.kernels.launch import Prepared
from polyattn.structures import Structure

NAN, INF = math.nan, math.inf
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Result = tuple[torch.Tensor, torch.Tensor]


def _random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def _unwritten(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.full((*q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype, device=q.device)


def _wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> Result:
    wanted: Result = pa.reference_attention(*(t.detach().cpu().double() for t in (q, k, v)), return_lse=True, **call)
    return wanted


def _agree(got: tuple[torch.Tensor, torch.Tensor | None], want: Result, dtype: torch.dtype) -> None:
    out, lse = got
    assert lse is not None
    assert lse.dtype == torch.float32
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), want[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), want[1].double(), atol=max(tolerance, 1e-4), rtol=0)


#: Sq, Sk, causal, window: blocks of 64 rows are cut at every place that a rule can cut them.
RULES = {
    "one block": (5, 7, False, None),
    "whole blocks": (64, 128, False, None),
    "many blocks": (130, 195, False, None),
    "causal square": (150, 150, True, None),
    "causal, more keys": (70, 200, True, None),
    "causal, rows that see nothing": (200, 70, True, None),
    "one query": (1, 130, True, None),
    "one key": (130, 1, False, None),
    "window": (200, 200, False, (70, 3)),
    "window of the diagonal": (140, 140, False, (0, 0)),
    "window, causal": (140, 200, True, (65, 0)),
    "window, left alone": (60, 200, False, (3, None)),
    "window, right alone": (60, 200, False, (None, 3)),
    "window, rows that see nothing": (200, 40, False, (10, 10)),
}


@pytest.mark.parametrize("rule", RULES)
def test_positions(device: str, dtypes: tuple[torch.dtype, ...], rule: str) -> None:
    queries, keys, causal, window = RULES[rule]
    for dtype in dtypes:
        q, k, v = (_random(device, dtype, 1, rows, 1, 16) for rows in (queries, keys, keys))
        scoring = Scoring(causal, 0.3, window, 0.0)
        got = batched(q, k, v, _unwritten(q, v), scoring, need_lse=True)
        _agree(got, _wanted(q, k, v, causal=causal, window=window, scale=0.3), dtype)


@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (3, None))])
@pytest.mark.parametrize("layout", ["as it is", "heads first", "parameter", "misaligned"])
def test_the_slot_bound_to_a_shape_is_the_slot(
    device: str, need_lse: bool, causal: bool, window: Any, layout: str
) -> None:
    q, k, v = (_random(device, torch.float16, 2, rows, heads, 40) for rows, heads in ((30, 4), (70, 2), (70, 2)))
    if layout == "heads first":
        q, k, v = (_laid_out(tensor, layout) for tensor in (q, k, v))
    if layout == "parameter":
        q = torch.nn.Parameter(q, requires_grad=False)
    facts = (TensorFacts(tuple(t.shape), t.stride(), "float16") for t in (q, k, v))
    request = Request(*facts, device=str(q.device), causal=causal, scale=0.3, window=window, softcap=9.0, lse=need_lse)
    run = triton_flash.bound_dense(request, ())
    assert run is not None
    rules: dict[str, Any] = {"causal": causal, "scale": 0.3, "window": window, "softcap": 9.0}
    want = triton_flash.dense(q, k, v, None, meta=None, need_lse=need_lse, options=(), **rules)
    for _ in range(2):
        out, lse = run(q, _moved(k) if layout == "misaligned" else k, v, None, meta=None)
        assert torch.equal(out, want[0])
        assert (lse is None) is (want[1] is None)
        if want[1] is not None:
            assert torch.equal(lse, want[1])


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same, a multiple of 2 and not of 16 bytes into its memory."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("change", [{"out": True}, {"autocast_dtype": "float16"}])
def test_a_call_with_a_buffer_or_a_cast_is_not_bound(change: dict[str, Any]) -> None:
    facts = TensorFacts.contiguous((1, 4, 2, 16), "float16")
    assert triton_flash.bound_dense(Request(facts, facts, facts, **change), ()) is None


@pytest.mark.parametrize("scale", [0.5, -0.5, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
def test_scores(device: str, dtypes: tuple[torch.dtype, ...], scale: float, softcap: float) -> None:
    for dtype in dtypes:
        q, k, v = (_random(device, dtype, 1, 70, 1, 16) for _ in range(3))
        got = batched(q, k, v, None, Scoring(True, scale, None, softcap), need_lse=True)
        _agree(got, _wanted(q, k, v, causal=True, scale=scale, softcap=softcap), dtype)


@pytest.mark.parametrize("softcap", [1e3, 1e4, 1e6, 1e20])
def test_a_large_softcap_keeps_the_digits_of_small_scores(
    device: str, dtypes: tuple[torch.dtype, ...], softcap: float
) -> None:
    for dtype in dtypes:
        q, k, v = (_random(device, dtype, 1, 70, 1, 16) for _ in range(3))
        got = batched(q, k, v, None, Scoring(False, 0.25, None, softcap), need_lse=True)
        _agree(got, _wanted(q, k, v, scale=0.25, softcap=softcap), dtype)


#: scale, softcap: finite, but not all that is made of them is so in float32.
EXTREMES = [
    (1e-46, 0.0), (-1e-46, 0.0), (1e-39, 0.0), (1e30, 0.0), (3e38, 0.0), (-1e39, 0.0), (0.1, 1e-46), (0.1, 1e-38),
    (0.1, 1e30), (0.1, 1e39), (1e39, 1e39), (1e-46, 1e-3), (1e-46, 1e-46), (1e30, 1e-10),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("scale", "softcap"), EXTREMES)
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_scores(device: str, scale: float, softcap: float, causal: bool) -> None:
    q, k, v = (_random(device, torch.float32, 1, rows, 2, 16) for rows in (7, 5, 5))
    out, lse = batched(q, k, v, None, Scoring(causal, scale, None, softcap), need_lse=True)
    want, want_lse = _wanted(q, k, v, causal=causal, scale=scale, softcap=softcap)
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-5, rtol=0)
    assert lse is not None
    assert torch.equal(lse.cpu().isneginf(), want_lse.isneginf())
    assert not bool((lse.isnan() | lse.isposinf()).any())
    if abs(scale) <= 1e30 and softcap <= 1e30:
        torch.testing.assert_close(lse.cpu().double(), want_lse.double(), atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize(("scale", "fused"), [(0.25, True), (50.0, True), (1e4, False), (3e38, False)])
def test_steep_scores_are_rounded_as_the_largest_of_them_is(
    device: str, scale: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused product would exceed the row's rounded maximum; only a GPU fuses."""
    launches: list[Prepared] = []
    monkeypatch.setattr(flash, "launch_prepared", lambda prepared, *others: launches.append(prepared))
    q = _random(device, torch.float32, 1, 7, 1, 16)
    batched(q, q, q, None, Scoring(False, scale, None, 0.0), need_lse=False)
    assert [launch.variant.constants["enable_fp_fusion"] for launch in launches] == [fused]


@pytest.mark.parametrize("dims", [(1, 1), (8, 40), (72, 72), (96, 64), (64, 96), (100, 128), (192, 256), (512, 8)])
def test_head_dims(device: str, dtypes: tuple[torch.dtype, ...], dims: tuple[int, int]) -> None:
    dim, v_dim = dims
    for dtype in dtypes:
        q, k = (_random(device, dtype, 1, rows, 1, dim) for rows in (20, 40))
        v = _random(device, dtype, 1, 40, 1, v_dim)
        got = batched(q, k, v, _unwritten(q, v), Scoring(False, dim**-0.5, None, 0.0), need_lse=True)
        _agree(got, _wanted(q, k, v), dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_groups_of_heads_and_samples(device: str, dtypes: tuple[torch.dtype, ...], kv_heads: int) -> None:
    for dtype in dtypes:
        q = _random(device, dtype, 3, 20, 6, 16)
        k, v = (_random(device, dtype, 3, 40, kv_heads, 16) for _ in range(2))
        got = batched(q, k, v, None, Scoring(True, 0.25, None, 0.0), need_lse=True)
        _agree(got, _wanted(q, k, v, causal=True), dtype)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same [B,S,H,D] with other strides; NaN lies between its rows."""
    batch, length, heads, dim = tensor.shape
    if layout == "heads first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "batch inside":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "dims apart":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    whole = tensor.new_full((batch, length + 3, heads + 1, dim + 2), NAN)
    whole[:, 2:-1, 1:, 1:-1] = tensor
    return whole[:, 2:-1, 1:, 1:-1]


@pytest.mark.parametrize("layout", ["heads first", "batch inside", "dims apart", "sliced"])
def test_strides_change_nothing(device: str, layout: str) -> None:
    q, k, v = (_random(device, torch.float32, 2, 70, 2, 24) for _ in range(3))
    scoring = Scoring(True, 0.2, None, 0.0)
    plain, _ = batched(q, k, v, None, scoring, need_lse=False)
    buffer = _laid_out(_unwritten(q, v), layout)
    got, lse = batched(*(_laid_out(t, layout) for t in (q, k, v)), buffer, scoring, need_lse=False)
    assert got is buffer
    assert lse is None
    assert torch.equal(got, plain)


def test_one_row_of_memory_may_be_every_key(device: str) -> None:
    q = _random(device, torch.float32, 1, 5, 1, 16)
    k = _random(device, torch.float32, 1, 1, 1, 16).expand(1, 70, 1, 16)
    got = batched(q, k, k, None, Scoring(False, 0.25, None, 0.0), need_lse=True)
    _agree(got, _wanted(q, k, k), torch.float32)


def _with(tensor: torch.Tensor, hidden: torch.Tensor, value: float) -> torch.Tensor:
    """`value` in the rows [B,S] or [T] that are hidden."""
    shape = (*hidden.shape, 1, 1)
    return tensor.masked_fill(hidden.to(tensor.device).reshape(shape), value)


#: A padding of [3, 140] and how the kernel may be told of it.
PADDINGS = ["lengths", "one length", "holes"]


@pytest.mark.parametrize("told", PADDINGS)
@pytest.mark.parametrize("queries", ["same", "all"])
@pytest.mark.parametrize("window", [None, (80, 5)])
def test_key_padding(device: str, dtypes: tuple[torch.dtype, ...], told: str, queries: Any, window: Any) -> None:
    lengths = torch.tensor([100, 100, 100] if told == "one length" else [140, 65, 0], dtype=torch.int32)
    keep = torch.arange(140) < lengths[:, None]
    if told == "holes":
        keep &= torch.arange(140) % 7 != 2
        keep[0, :70] = False
    structure = pa.KeyPadding.from_mask(keep, queries=queries)
    used: Any = 100 if told == "one length" else lengths.to(device)
    seen = Visibility(used_k=used, used_q=used if queries == "same" else None)
    if told == "holes":
        seen = Visibility(keep=keep.to(device), keep_q=keep.to(device) if queries == "same" else None)
    for dtype in dtypes:
        q, k, v = (_random(device, dtype, 3, 140, 1, 16) for _ in range(3))
        want = _wanted(q, k, v, structure=structure, window=window, scale=0.3)
        if queries == "same":
            q = _with(q, ~keep, NAN)
        k, v = _with(k, ~keep, NAN), _with(v, ~keep, INF)
        _agree(batched(q, k, v, _unwritten(q, v), Scoring(False, 0.3, window, 0.0), seen, need_lse=True), want, dtype)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (5, 2))])
def test_documents(device: str, dtypes: tuple[torch.dtype, ...], causal: bool, window: Any) -> None:
    structure = pa.Packed.from_lengths([5, 0, 70, 9, 64], [6, 3, 0, 150, 64])
    cu_q, cu_k = structure.cu_q.to(device), structure.cu_k.to(device)
    for dtype in dtypes:
        q, k, v = (
            _random(device, dtype, 350, 2, 16),
            _random(device, dtype, 230, 1, 16),
            _random(device, dtype, 230, 1, 8),
        )
        want = _wanted(q, k, v, structure=structure, causal=causal, window=window)
        q, k, v = (_with(t, torch.arange(t.shape[0]) >= used, NAN) for t, used in ((q, 148), (k, 223), (v, 223)))
        got = packed(
            q, k, v, _unwritten(q, v), Scoring(causal, 0.25, window, 0.0),
            cu_q=cu_q, cu_k=cu_k, max_q=70, need_lse=True,
        )  # fmt: skip
        _agree(got, want, dtype)


def test_lengths_with_steps_are_read_where_they_lie(device: str) -> None:
    structure = pa.Packed.from_lengths([5, 9])
    cu = torch.stack([structure.cu_q, torch.full((3,), 1000, dtype=torch.int32)], 1).to(device)[:, 0]
    q = _random(device, torch.float32, 14, 1, 16)
    scoring = Scoring(False, 0.25, None, 0.0)
    got = packed(q, q, q, _unwritten(q, q), scoring, cu_q=cu, cu_k=cu, max_q=9, need_lse=True)
    _agree(got, _wanted(q, q, q, structure=structure), torch.float32)
    used, marks = (torch.tensor(pairs, dtype=torch.int32, device=device)[:, 0] for pairs in ([[3, 0], [7, 0]],) * 2)
    seen = Visibility(used_q=used, used_k=used, only_if=marks)
    q = _random(device, torch.float32, 2, 7, 1, 16)
    out, lse = torch.full_like(q, NAN), torch.full((2, 1, 7), NAN, device=device)
    batched(q, q, q, out, scoring, seen, need_lse=True, lse=lse)
    _agree((out, lse), _wanted(q, q, q, structure=pa.KeyPadding.from_lengths([3, 7], 7)), torch.float32)


def test_boundaries_past_the_tensors_touch_nothing(device: str) -> None:
    """What a device tensor says is trusted no further than memory goes; positions are as it says."""
    q, k = _random(device, torch.float32, 90, 1, 16), _random(device, torch.float32, 60, 1, 16)
    cu_q, cu_k = torch.tensor([0, 50, 200], dtype=torch.int32), torch.tensor([0, 30, 170], dtype=torch.int32)
    row, key = torch.arange(90).reshape(90, 1), torch.arange(60)
    first = (row < 50) & (key < 30) & (key <= row - 20)
    second = (row >= 50) & (key >= 30) & (key - 30 <= row - 50 - 10)
    want, want_lse = _wanted(q[None], k[None], k[None], structure=pa.Mask((first | second)[None]))
    got = packed(
        q, k, k, _unwritten(q, k), Scoring(True, 0.25, None, 0.0),
        cu_q=cu_q.to(device), cu_k=cu_k.to(device), max_q=150, need_lse=True,
    )  # fmt: skip
    _agree(got, (want[0], want_lse[0]), torch.float32)


SPANS: list[Structure] = [
    pa.Spans([[(3, 70), (80, 81), (90, 139)]]),
    pa.Spans([[]]),
    pa.Spans([[(0, 139)]]),
    pa.Spans([[(10, 120)]], query_ranges=[(0, 20, 0), (20, 90, 60)]),
]


@pytest.mark.parametrize("structure", SPANS, ids=["several", "none", "all", "ranges"])
def test_spans(device: str, dtypes: tuple[torch.dtype, ...], structure: pa.Spans) -> None:
    queries = 139 if structure.query_ranges is None else 90
    for dtype in dtypes:
        q, k, v = (_random(device, dtype, 1, rows, 1, 16) for rows in (queries, 139, 139))
        meta = structure.bind(q.device, tuple(q.shape), tuple(k.shape))
        seen = Visibility(ends=meta.visible_end(queries, 139))
        got = batched(q, k, v, _unwritten(q, v), Scoring(False, 0.25, None, 0.0), seen, need_lse=True)
        _agree(got, _wanted(q, k, v, structure=structure), dtype)


@pytest.mark.parametrize("marks", [[0, 1, 0], [1, 0, 1], [0, 0, 0]])
def test_only_marked_samples_are_written(device: str, marks: list[int]) -> None:
    q, k, v = (_random(device, torch.float32, 3, 70, 2, 16) for _ in range(3))
    out, lse = torch.full_like(q, 7.0), torch.full((3, 2, 70), 7.0, device=device)
    seen = Visibility(only_if=torch.tensor(marks, dtype=torch.int32, device=device))
    scoring = Scoring(True, 0.25, None, 0.0)
    got = batched(q, k, v, out, scoring, seen, need_lse=True, lse=lse)
    want = _wanted(q, k, v, causal=True)
    for sample, marked in enumerate(marks):
        for tensor, wanted in zip((out, lse), want, strict=True):
            expected = wanted[sample].float() if marked else torch.full_like(tensor[sample], 7.0).cpu()
            torch.testing.assert_close(tensor[sample].cpu(), expected, atol=2e-5, rtol=0)
    assert got[0] is out
    assert got[1] is lse


def test_only_marked_documents_are_written(device: str) -> None:
    structure = pa.Packed.from_lengths([70, 9, 20])
    q = _random(device, torch.float32, 110, 1, 16)
    out, lse = torch.full_like(q, 7.0), torch.full((1, 110), 7.0, device=device)
    cu = structure.cu_q.to(device)
    packed(
        q, q, q, out, Scoring(False, 0.25, None, 0.0),
        Visibility(only_if=torch.tensor([1, 0, 1], dtype=torch.int32, device=device)),
        cu_q=cu, cu_k=cu, max_q=70, need_lse=True, lse=lse,
    )  # fmt: skip
    want, want_lse = _wanted(q, q, q, structure=structure)
    untouched = torch.zeros(110, dtype=torch.bool)
    untouched[70:79] = untouched[99:] = True
    torch.testing.assert_close(out.cpu(), _with(want.float(), untouched, 7.0), atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.cpu(), want_lse.float().masked_fill(untouched, 7.0), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_visible_nan_is_not_hidden(device: str) -> None:
    q, k, v = (_random(device, torch.float32, 1, 70, 1, 16) for _ in range(3))
    k[0, 69] = NAN
    out, _ = batched(q, k, v, None, Scoring(True, 0.25, None, 0.0), need_lse=False)
    assert bool(out[0, 69].isnan().all())
    assert not bool(out[0, :69].isnan().any())
