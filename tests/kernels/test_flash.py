"""The flash kernel against the reference: positions, scores, head dims, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.backends import triton_flash
from polyattn.door.request import Request, TensorFacts
from polyattn.kernels import flash
from polyattn.kernels.flash import Scoring, batched
from polyattn.kernels.launch import Prepared
from tests.kernels.flash_cases import NAN, agree, random, unwritten, wanted

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
        q, k, v = (random(device, dtype, 1, rows, 1, 16) for rows in (queries, keys, keys))
        scoring = Scoring(causal, 0.3, window, 0.0)
        got = batched(q, k, v, unwritten(q, v), scoring, need_lse=True)
        agree(got, wanted(q, k, v, causal=causal, window=window, scale=0.3), dtype)


@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (3, None))])
@pytest.mark.parametrize("layout", ["as it is", "heads first", "parameter", "misaligned"])
def test_the_slot_bound_to_a_shape_is_the_slot(
    device: str, need_lse: bool, causal: bool, window: Any, layout: str
) -> None:
    q, k, v = (random(device, torch.float16, 2, rows, heads, 40) for rows, heads in ((30, 4), (70, 2), (70, 2)))
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
        q, k, v = (random(device, dtype, 1, 70, 1, 16) for _ in range(3))
        got = batched(q, k, v, None, Scoring(True, scale, None, softcap), need_lse=True)
        agree(got, wanted(q, k, v, causal=True, scale=scale, softcap=softcap), dtype)


@pytest.mark.parametrize("softcap", [1e3, 1e4, 1e6, 1e20])
def test_a_large_softcap_keeps_the_digits_of_small_scores(
    device: str, dtypes: tuple[torch.dtype, ...], softcap: float
) -> None:
    for dtype in dtypes:
        q, k, v = (random(device, dtype, 1, 70, 1, 16) for _ in range(3))
        got = batched(q, k, v, None, Scoring(False, 0.25, None, softcap), need_lse=True)
        agree(got, wanted(q, k, v, scale=0.25, softcap=softcap), dtype)


#: scale, softcap: finite, but not all that is made of them is so in float32.
EXTREMES = [
    (1e-46, 0.0), (-1e-46, 0.0), (1e-39, 0.0), (1e30, 0.0), (3e38, 0.0), (-1e39, 0.0), (0.1, 1e-46), (0.1, 1e-38),
    (0.1, 1e30), (0.1, 1e39), (1e39, 1e39), (1e-46, 1e-3), (1e-46, 1e-46), (1e30, 1e-10),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("scale", "softcap"), EXTREMES)
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_scores(device: str, scale: float, softcap: float, causal: bool) -> None:
    q, k, v = (random(device, torch.float32, 1, rows, 2, 16) for rows in (7, 5, 5))
    out, lse = batched(q, k, v, None, Scoring(causal, scale, None, softcap), need_lse=True)
    want, want_lse = wanted(q, k, v, causal=causal, scale=scale, softcap=softcap)
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
    q = random(device, torch.float32, 1, 7, 1, 16)
    batched(q, q, q, None, Scoring(False, scale, None, 0.0), need_lse=False)
    assert [launch.variant.constants["enable_fp_fusion"] for launch in launches] == [fused]


@pytest.mark.parametrize("dims", [(1, 1), (8, 40), (72, 72), (96, 64), (64, 96), (100, 128), (192, 256), (512, 8)])
def test_head_dims(device: str, dtypes: tuple[torch.dtype, ...], dims: tuple[int, int]) -> None:
    dim, v_dim = dims
    for dtype in dtypes:
        q, k = (random(device, dtype, 1, rows, 1, dim) for rows in (20, 40))
        v = random(device, dtype, 1, 40, 1, v_dim)
        got = batched(q, k, v, unwritten(q, v), Scoring(False, dim**-0.5, None, 0.0), need_lse=True)
        agree(got, wanted(q, k, v), dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_groups_of_heads_and_samples(device: str, dtypes: tuple[torch.dtype, ...], kv_heads: int) -> None:
    for dtype in dtypes:
        q = random(device, dtype, 3, 20, 6, 16)
        k, v = (random(device, dtype, 3, 40, kv_heads, 16) for _ in range(2))
        got = batched(q, k, v, None, Scoring(True, 0.25, None, 0.0), need_lse=True)
        agree(got, wanted(q, k, v, causal=True), dtype)


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
    q, k, v = (random(device, torch.float32, 2, 70, 2, 24) for _ in range(3))
    scoring = Scoring(True, 0.2, None, 0.0)
    plain, _ = batched(q, k, v, None, scoring, need_lse=False)
    buffer = _laid_out(unwritten(q, v), layout)
    got, lse = batched(*(_laid_out(t, layout) for t in (q, k, v)), buffer, scoring, need_lse=False)
    assert got is buffer
    assert lse is None
    assert torch.equal(got, plain)


def test_one_row_of_memory_may_be_every_key(device: str) -> None:
    q = random(device, torch.float32, 1, 5, 1, 16)
    k = random(device, torch.float32, 1, 1, 1, 16).expand(1, 70, 1, 16)
    got = batched(q, k, k, None, Scoring(False, 0.25, None, 0.0), need_lse=True)
    agree(got, wanted(q, k, k), torch.float32)
