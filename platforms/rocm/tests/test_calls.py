"""What reaches the makers' functions, and what becomes of their answers: fakes that record, and answer as asked."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from polyattn import Packed, reference_attention
from polyattn.vendor import TORCH_ROWS, flash2_calls, varlen
from polyattn.vendor import torch_varlen as shared
from polyattn_rocm import aiter, aiter_forward, ck, flash_attn, flash_attn_triton, square, torch_varlen

CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": True}
INF = float("inf")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Recorder:
    """A dense and a packed function in the order of flash-attn's arguments, right by the reference, with its calls."""

    def __init__(self, probs: bool) -> None:
        self.calls: list[dict[str, Any]] = []
        self.probs = probs

    def dense(self, **call: Any) -> Any:
        self.calls.append(call)
        out, lse = reference_attention(
            call["q"], call["k"], call["v"], causal=call["causal"], scale=call["softmax_scale"], return_lse=True
        )
        return self._answer(call, out, lse)

    def packed(self, **call: Any) -> Any:
        self.calls.append(call)
        documents = Packed.from_cu_seqlens(call["cu_seqlens_q"], call["cu_seqlens_k"], check=True)
        out, lse = reference_attention(
            call["q"], call["k"], call["v"], structure=documents, causal=call["causal"], scale=call["softmax_scale"],
            return_lse=True,
        )  # fmt: skip
        return self._answer(call, out, lse)

    def _answer(self, call: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> Any:
        out, lse = out.to(call["q"].dtype), lse.float().masked_fill(lse.isneginf(), INF)
        if not call.get("return_lse", call.get("return_attn_probs")):
            return out
        return (out, lse, None) if self.probs else (out, lse)


@pytest.fixture
def aiters(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(probs=False)
    monkeypatch.setattr(aiter_forward, "bound", lambda: (recorder.dense, recorder.packed))
    return recorder


@pytest.fixture
def tritons(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The Triton route, whose packed LSE is [T,H] and 0 where it saw nothing under causal."""
    recorder = Recorder(probs=True)

    def packed(**call: Any) -> Any:
        answer = recorder.packed(**call)
        if not call["return_attn_probs"]:
            return answer
        return answer[0], answer[1].T.contiguous(), None

    monkeypatch.setattr(flash_attn_triton, "functions", lambda of_triton: (recorder.dense, packed))
    return recorder


def documents(kernel: Any, q: torch.Tensor, k: torch.Tensor, lengths_q: list[int], lengths_k: list[int], **call: Any):
    return kernel(
        q, k, k, None, cu_q=boundaries(lengths_q), cu_k=boundaries(lengths_k), max_q=max(lengths_q),
        max_k=max(lengths_k), **CALL | call,
    )  # fmt: skip


def test_aiters_dense_call(aiters: Recorder) -> None:
    q = drawn(1, 5, 2, 64)
    out, lse = aiter.dense(q, q, q, None, meta=None, options=(), **CALL | {"causal": True})
    call = aiters.calls[0]
    assert {name for name in call if name not in ("q", "k", "v")} == {
        "dropout_p", "softmax_scale", "causal", "window_size", "deterministic", "return_lse", "return_attn_probs",
    }  # fmt: skip
    assert (call["window_size"], call["return_lse"], call["return_attn_probs"]) == ((-1, 0), True, False)
    torch.testing.assert_close(out, reference_attention(q, q, q, causal=True, scale=0.125).float(), atol=1e-5, rtol=0)
    assert lse is not None
    assert lse.shape == (1, 2, 5)


def test_aiters_packed_call_has_its_own_words(aiters: Recorder) -> None:
    q, k = drawn(5, 2, 64), drawn(5, 2, 64)
    documents(partial(aiter_forward.documents, False), q, k, [2, 3], [2, 3], need_lse=False)
    call = aiters.calls[0]
    assert (call["min_seqlen_q"], call["logits_soft_cap"], call["max_seqlen_q"]) == (0, 0.0, 3)
    assert "softcap" not in call
    assert call["return_lse"] is False


@pytest.mark.parametrize("window", [None, (1, 1)])
def test_more_queries_than_keys_under_a_window_are_told_as_the_most_keys(aiters: Recorder, window: Any) -> None:
    """Else the kernel's host code takes a right side of so many keys for unbounded."""
    q, k = drawn(12, 2, 64), drawn(5, 2, 64)
    call = {"need_lse": False, "window": window}
    documents(partial(aiter_forward.documents, False), q, k, [9, 3], [2, 3], **call)
    flash = partial(flash2_calls.documents, lambda: (aiters.dense, aiters.packed), False)
    documents(flash, q, k, [9, 3], [2, 3], **call)
    assert [call["max_seqlen_k"] for call in aiters.calls] == [3 if window is None else 9] * 2


def test_a_softcap_goes_to_aiters_packed_function(aiters: Recorder) -> None:
    q = drawn(2, 3, 2, 64)
    aiter.dense(q, q, q, None, meta=None, options=(), **CALL | {"softcap": 30.0})
    assert aiters.calls[0]["logits_soft_cap"] == 30.0
    assert aiters.calls[0]["cu_seqlens_q"].tolist() == [0, 3, 6]


@pytest.mark.parametrize("slot", [aiter.dense, aiter.dense_steady])
def test_where_there_are_gradients_aiter_is_asked_for_an_lse_that_nobody_gets(aiters: Recorder, slot: Any) -> None:
    q = drawn(1, 5, 2, 64).requires_grad_()
    _, lse = slot(q, q, q, None, meta=None, options=(), **CALL | {"need_lse": False})
    assert aiters.calls[0]["return_lse"] is True
    assert aiters.calls[0]["deterministic"] == (slot is aiter.dense_steady)
    assert lse is None


@pytest.mark.parametrize("causal", [False, True])
def test_single_queries_reach_aiter_in_copies(aiters: Recorder, causal: bool) -> None:
    q, k = drawn(3, 2, 64), drawn(9, 2, 64)
    kernel = aiter.packed.args[0]
    out, lse = documents(kernel, q, k, [1, 1, 1], [4, 0, 5], causal=causal)
    assert aiters.calls[0]["max_seqlen_q"] == 8
    assert aiters.calls[0]["q"].shape[0] == 24
    structure = Packed.from_lengths([1, 1, 1], [4, 0, 5])
    want, want_lse = reference_attention(q, k, k, structure=structure, causal=causal, scale=0.125, return_lse=True)
    torch.testing.assert_close(out.double(), want.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-5, rtol=0)


def test_keys_of_documents_without_queries_are_kept_from_the_backward() -> None:
    given: list[torch.Tensor] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, **call: Any) -> Any:
        given.append(k)
        return q, None

    q, k = drawn(3, 2, 64).requires_grad_(), drawn(6, 2, 64).requires_grad_()
    cu = {"cu_q": boundaries([1, 0, 2]), "cu_k": boundaries([2, 3, 1]), "max_q": 2, "max_k": 3}
    ck.documents(kernel, q, k, k, None, **cu, **CALL)
    assert given[0][2:5].eq(0).all()
    given[0].backward(torch.full_like(k, float("nan")))
    assert k.grad is not None
    assert k.grad[2:5].eq(0).all()
    with torch.no_grad():
        ck.documents(kernel, q, k, k, None, **cu, **CALL)
    assert given[1] is k


def test_flash_attn_over_ck_is_called_as_its_package_says() -> None:
    recorder = Recorder(probs=True)
    bound = (recorder.dense, recorder.packed)
    q = drawn(5, 2, 64)
    kernel = partial(ck.documents, partial(flash2_calls.documents, lambda: bound, False))
    _, lse = documents(kernel, q, q, [5, 0], [4, 1])
    call = recorder.calls[0]
    assert (call["dropout_p"], call["softcap"], call["return_attn_probs"]) == (0.0, 0.0, True)
    assert lse.isfinite().all()
    assert {slot.features.softcap for slot in flash_attn.backend().slots} == {False}


def test_the_triton_routes_lse_is_turned(tritons: Recorder) -> None:
    q, k = drawn(5, 3, 64), drawn(4, 3, 64)
    out, lse = documents(flash_attn_triton.documents, q, k, [3, 2], [4, 0])
    want, want_lse = reference_attention(
        q, k, k, structure=Packed.from_lengths([3, 2], [4, 0]), scale=0.125, return_lse=True
    )
    torch.testing.assert_close(out.double(), want.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-5, rtol=0)


def test_the_triton_route_gets_only_queries_that_see_a_key(tritons: Recorder) -> None:
    q, k = drawn(2, 7, 3, 64), drawn(2, 4, 3, 64)
    out, lse = flash_attn_triton.dense(q, k, k, None, meta=None, options=(), **CALL | {"causal": True})
    assert tritons.calls[0]["q"].shape[0] == 8
    want, want_lse = reference_attention(q, k, k, causal=True, scale=0.125, return_lse=True)
    torch.testing.assert_close(out.double(), want.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-5, rtol=0)
    few, _ = flash_attn_triton.dense(k, q, q, None, meta=None, options=(), **CALL | {"causal": True})
    assert tritons.calls[1]["q"].shape[0] == 8, "it aligns causal as we do: nothing is put before few queries"
    torch.testing.assert_close(few.double(), reference_attention(k, q, q, causal=True, scale=0.125), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [[2, 0, 3, 0], [0, 0], [2, 3]])
def test_no_empty_document_reaches_a_kernel_under_causal(lengths: list[int]) -> None:
    given: list[Any] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, *, cu_q: Any, cu_k: Any, **call: Any):
        given.append((cu_q.tolist(), cu_q is cu_k))
        return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])

    q, structure = drawn(6, 2, 64), Packed.from_lengths(lengths)
    meta = structure.bind(torch.device("cpu"), tuple(q.shape), tuple(q.shape))
    for _ in range(2):  # what is derived is kept
        square.packed(kernel, TORCH_ROWS, q, q, q, None, meta=meta, options=(), **CALL | {"causal": True})
    filled = [length for length in lengths if length]
    assert given == [(boundaries(filled).tolist(), True)] * (2 if filled else 0)
    square.packed(kernel, TORCH_ROWS, q, q, q, None, meta=meta, options=(), **CALL)
    assert not filled or len(given[-1][0]) == len(lengths) + 1, "without causal it may see them"


@pytest.mark.parametrize("per_document", [True, False])
def test_torchs_lse_by_document_or_by_row_becomes_ours(monkeypatch: pytest.MonkeyPatch, per_document: bool) -> None:
    lengths_q, lengths_k = [2, 0, 3, 1], [3, 1, 0, 2]
    q, k = drawn(8, 3, 64), drawn(6, 3, 64)  # two rows behind the last boundary
    structure = Packed.from_lengths(lengths_q, lengths_k)
    want, by_row = reference_attention(q, k, k, structure=structure, scale=0.125, return_lse=True)
    cu_q, cu_k = boundaries(lengths_q), boundaries(lengths_k)

    def varlen_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any) -> Any:
        assert "num_splits" not in call, "ROCm's build refuses it"
        lse = by_row.float()
        if per_document:
            lse = torch.full((4, 3, 3), float("nan"))
            for i, length in enumerate(lengths_q):
                lse[i, :, :length] = by_row[:, cu_q[i] : cu_q[i] + length]
            lse[2] = float("nan")  # of a document without keys no source says what the LSE is
        return want.float(), lse

    monkeypatch.setattr(shared, "_bound", lambda: (varlen_attn, object()))
    out, lse = torch_varlen.documents(q, k, k, None, cu_q=cu_q, cu_k=cu_k, max_q=3, max_k=3, **CALL)
    assert lse is not None
    torch.testing.assert_close(lse[:, :6].double(), by_row[:, :6].double(), atol=1e-6, rtol=0)
    assert lse[:, 2:5].isneginf().all()
    assert out.shape == q.shape


def test_torch_gets_squares_under_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []

    def batched(kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, **call: Any) -> Any:
        shapes.append((q.shape[1], k.shape[1], call["causal"]))
        result, lse = reference_attention(q, k, v, causal=call["causal"], scale=call["scale"], return_lse=True)
        return result.float(), lse.float()

    monkeypatch.setattr(varlen, "batched", batched)
    for queries, keys in ((3, 7), (7, 3), (4, 4), (2, 0)):
        q, k = drawn(1, queries, 2, 64), drawn(1, keys, 2, 64)
        out, lse = torch_varlen.dense(q, k, k, None, meta=None, options=(), **CALL | {"causal": True})
        want, want_lse = reference_attention(q, k, k, causal=True, scale=0.125, return_lse=True)
        torch.testing.assert_close(out.double(), want.double(), atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-5, rtol=0)
    assert shapes == [(7, 7, True), (3, 3, True), (4, 4, True)]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_under_causal_torch_is_told_of_as_many_queries_as_keys(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Its backward asks for that; beside fewer KV heads, a document of one query is stated as two."""
    told: list[tuple[int, int]] = []

    def varlen_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any) -> torch.Tensor:
        told.append((call["max_q"], call["max_k"]))
        return query.clone()

    monkeypatch.setattr(shared, "_bound", lambda: (varlen_attn, object()))
    q, k, cu = drawn(2 * rows, 4, 64), drawn(2 * rows, 2, 64), boundaries([rows, rows])
    asked = CALL | {"causal": True, "need_lse": False}
    torch_varlen.documents(q, k, k, None, cu_q=cu, cu_k=cu, max_q=rows, max_k=rows, **asked)
    assert told == [(max(rows, 2),) * 2]
