"""The flash kernel against the reference: paddings, documents, spans, marks; nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.kernels.flash import Scoring, Visibility, batched, packed
from polyattn.structures import Structure
from tests.kernels.flash_cases import INF, NAN, agree, random, unwritten, wanted


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
        q, k, v = (random(device, dtype, 3, 140, 1, 16) for _ in range(3))
        want = wanted(q, k, v, structure=structure, window=window, scale=0.3)
        if queries == "same":
            q = _with(q, ~keep, NAN)
        k, v = _with(k, ~keep, NAN), _with(v, ~keep, INF)
        agree(batched(q, k, v, unwritten(q, v), Scoring(False, 0.3, window, 0.0), seen, need_lse=True), want, dtype)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (5, 2))])
def test_documents(device: str, dtypes: tuple[torch.dtype, ...], causal: bool, window: Any) -> None:
    structure = pa.Packed.from_lengths([5, 0, 70, 9, 64], [6, 3, 0, 150, 64])
    cu_q, cu_k = structure.cu_q.to(device), structure.cu_k.to(device)
    for dtype in dtypes:
        q, k, v = (
            random(device, dtype, 350, 2, 16),
            random(device, dtype, 230, 1, 16),
            random(device, dtype, 230, 1, 8),
        )
        want = wanted(q, k, v, structure=structure, causal=causal, window=window)
        q, k, v = (_with(t, torch.arange(t.shape[0]) >= used, NAN) for t, used in ((q, 148), (k, 223), (v, 223)))
        got = packed(
            q, k, v, unwritten(q, v), Scoring(causal, 0.25, window, 0.0),
            cu_q=cu_q, cu_k=cu_k, max_q=70, need_lse=True,
        )  # fmt: skip
        agree(got, want, dtype)


def test_lengths_with_steps_are_read_where_they_lie(device: str) -> None:
    structure = pa.Packed.from_lengths([5, 9])
    cu = torch.stack([structure.cu_q, torch.full((3,), 1000, dtype=torch.int32)], 1).to(device)[:, 0]
    q = random(device, torch.float32, 14, 1, 16)
    scoring = Scoring(False, 0.25, None, 0.0)
    got = packed(q, q, q, unwritten(q, q), scoring, cu_q=cu, cu_k=cu, max_q=9, need_lse=True)
    agree(got, wanted(q, q, q, structure=structure), torch.float32)
    used, marks = (torch.tensor(pairs, dtype=torch.int32, device=device)[:, 0] for pairs in ([[3, 0], [7, 0]],) * 2)
    seen = Visibility(used_q=used, used_k=used, only_if=marks)
    q = random(device, torch.float32, 2, 7, 1, 16)
    out, lse = torch.full_like(q, NAN), torch.full((2, 1, 7), NAN, device=device)
    batched(q, q, q, out, scoring, seen, need_lse=True, lse=lse)
    agree((out, lse), wanted(q, q, q, structure=pa.KeyPadding.from_lengths([3, 7], 7)), torch.float32)


def test_boundaries_past_the_tensors_touch_nothing(device: str) -> None:
    """What a device tensor says is trusted no further than memory goes; positions are as it says."""
    q, k = random(device, torch.float32, 90, 1, 16), random(device, torch.float32, 60, 1, 16)
    cu_q, cu_k = torch.tensor([0, 50, 200], dtype=torch.int32), torch.tensor([0, 30, 170], dtype=torch.int32)
    row, key = torch.arange(90).reshape(90, 1), torch.arange(60)
    first = (row < 50) & (key < 30) & (key <= row - 20)
    second = (row >= 50) & (key >= 30) & (key - 30 <= row - 50 - 10)
    want, want_lse = wanted(q[None], k[None], k[None], structure=pa.Mask((first | second)[None]))
    got = packed(
        q, k, k, unwritten(q, k), Scoring(True, 0.25, None, 0.0),
        cu_q=cu_q.to(device), cu_k=cu_k.to(device), max_q=150, need_lse=True,
    )  # fmt: skip
    agree(got, (want[0], want_lse[0]), torch.float32)


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
        q, k, v = (random(device, dtype, 1, rows, 1, 16) for rows in (queries, 139, 139))
        meta = structure.bind(q.device, tuple(q.shape), tuple(k.shape))
        seen = Visibility(ends=meta.visible_end(queries, 139))
        got = batched(q, k, v, unwritten(q, v), Scoring(False, 0.25, None, 0.0), seen, need_lse=True)
        agree(got, wanted(q, k, v, structure=structure), dtype)


@pytest.mark.parametrize("marks", [[0, 1, 0], [1, 0, 1], [0, 0, 0]])
def test_only_marked_samples_are_written(device: str, marks: list[int]) -> None:
    q, k, v = (random(device, torch.float32, 3, 70, 2, 16) for _ in range(3))
    out, lse = torch.full_like(q, 7.0), torch.full((3, 2, 70), 7.0, device=device)
    seen = Visibility(only_if=torch.tensor(marks, dtype=torch.int32, device=device))
    scoring = Scoring(True, 0.25, None, 0.0)
    got = batched(q, k, v, out, scoring, seen, need_lse=True, lse=lse)
    want = wanted(q, k, v, causal=True)
    for sample, marked in enumerate(marks):
        for tensor, right in zip((out, lse), want, strict=True):
            expected = right[sample].float() if marked else torch.full_like(tensor[sample], 7.0).cpu()
            torch.testing.assert_close(tensor[sample].cpu(), expected, atol=2e-5, rtol=0)
    assert got[0] is out
    assert got[1] is lse


def test_only_marked_documents_are_written(device: str) -> None:
    structure = pa.Packed.from_lengths([70, 9, 20])
    q = random(device, torch.float32, 110, 1, 16)
    out, lse = torch.full_like(q, 7.0), torch.full((1, 110), 7.0, device=device)
    cu = structure.cu_q.to(device)
    packed(
        q, q, q, out, Scoring(False, 0.25, None, 0.0),
        Visibility(only_if=torch.tensor([1, 0, 1], dtype=torch.int32, device=device)),
        cu_q=cu, cu_k=cu, max_q=70, need_lse=True, lse=lse,
    )  # fmt: skip
    want, want_lse = wanted(q, q, q, structure=structure)
    untouched = torch.zeros(110, dtype=torch.bool)
    untouched[70:79] = untouched[99:] = True
    torch.testing.assert_close(out.cpu(), _with(want.float(), untouched, 7.0), atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.cpu(), want_lse.float().masked_fill(untouched, 7.0), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_visible_nan_is_not_hidden(device: str) -> None:
    q, k, v = (random(device, torch.float32, 1, 70, 1, 16) for _ in range(3))
    k[0, 69] = NAN
    out, _ = batched(q, k, v, None, Scoring(True, 0.25, None, 0.0), need_lse=False)
    assert bool(out[0, 69].isnan().all())
    assert not bool(out[0, :69].isnan().any())
