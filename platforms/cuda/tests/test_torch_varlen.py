"""torch_varlen: each release's signature, and FlashAttention 2's rules, over torch's flash ops emulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from polyattn import Packed, Paged, PagedKVCache, reference_attention
from polyattn.vendor import (
    Accepted,
    Features,
    Machine,
    Rejected,
    Request,
    StructureFacts,
    TensorFacts,
    resolve,
    unmet,
    varlen,
)
from polyattn.vendor import torch_varlen as shared
from polyattn_cuda import torch_varlen
from tests.emulators.cuda import aten_flash

pytestmark = pytest.mark.emulated

H200 = Machine("cuda", "cuda", arch="sm_90", versions={"torch": "2.11.0+cu130"})
IN_2_10 = frozenset({"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "return_aux"})
IN_2_11 = IN_2_10 - {"is_causal"} | {"scale", "window_size"}
IN_2_12 = IN_2_11 | {"enable_gqa", "seqused_k", "block_table", "num_splits"}
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": True}


@pytest.fixture(scope="module", autouse=True)
def torch_has_flash_ops() -> None:
    if "block_table" not in shared.PARAMETERS:
        pytest.skip(f"torch {torch.__version__} has not the varlen_attn that these tests run over")
    aten_flash.install()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def request(kind: str = "dense", *, heads: int = 2, dim: int = 64, **facts: Any) -> Request:
    q = TensorFacts.contiguous((1, 8, 2, dim), "bfloat16")
    k = TensorFacts.contiguous((1, 8, heads, dim), "bfloat16")
    return Request(q, k, k, device="cuda:0", structure_kind=kind, scale=facts.pop("scale", dim**-0.5), **facts)


def decision(asked: Request, machine: Machine = H200) -> Accepted | Rejected:
    return resolve(asked, machine, [torch_varlen.backend()])[0]


def features(kind: str, *, backward: bool = False) -> Features:
    slots = torch_varlen.backend().slots
    return next(s.features for s in slots if kind in s.features.kinds and s.features.backward == backward)


@pytest.mark.parametrize(
    ("parameters", "window", "gqa", "pages"),
    [(IN_2_10, False, False, False), (IN_2_11, True, False, False), (IN_2_12, True, True, True)],
)
def test_features_are_those_of_the_signature(monkeypatch, parameters, window, gqa, pages):
    monkeypatch.setattr(shared, "PARAMETERS", parameters)
    assert (features("dense").window, features("dense").gqa) == (window, gqa)
    assert any("paged" in slot.features.kinds for slot in torch_varlen.backend().slots) == pages


def test_the_lse_and_gradients_exclude_each_other():
    assert features("packed").lse
    assert not features("packed", backward=True).lse
    assert isinstance(decision(request(lse=True, grad=True)), Rejected)


def test_an_old_torch_is_a_reason_by_version():
    answer = decision(request(), Machine("cuda", "cuda", arch="sm_90", versions={"torch": "2.9.1+cu128"}))
    assert isinstance(answer, Rejected)
    assert "2.9.1" in answer.reasons[0]
    assert "2.10" in answer.reasons[0]


def test_2_10_takes_the_usual_scale_alone(monkeypatch):
    monkeypatch.setattr(shared, "PARAMETERS", IN_2_10)
    assert isinstance(decision(request()), Accepted)
    answer = decision(request(scale=0.3))
    assert isinstance(answer, Rejected)
    assert "scale 0.3" in answer.reasons[0]


def test_an_architecture_without_code_is_a_reason():
    answer = decision(request(), Machine("cuda", "cuda", arch="sm_75", versions={"torch": "2.11.0"}))
    assert isinstance(answer, Rejected)
    assert "sm_75" in answer.reasons[0]


@pytest.mark.parametrize(
    ("parameters", "causal", "window", "expected"),
    [
        (IN_2_10, True, None, {"is_causal": True}),
        (IN_2_11, False, None, {"scale": 0.5, "window_size": (-1, -1)}),
        (IN_2_11, True, None, {"scale": 0.5, "window_size": (-1, 0)}),
        (IN_2_11, True, (4, 0), {"scale": 0.5, "window_size": (4, 0)}),
        (IN_2_11, False, (None, 2), {"scale": 0.5, "window_size": (-1, 2)}),
        (IN_2_12, False, (3, None), {"scale": 0.5, "window_size": (3, -1), "num_splits": 1}),
    ],
)
def test_causal_scale_and_window_in_each_releases_words(monkeypatch, parameters, causal, window, expected):
    monkeypatch.setattr(shared, "PARAMETERS", parameters)
    assert shared.asked(causal, 0.5, window) | torch_varlen._more() == expected


def documents(q_lengths, k_lengths, q, k, v, **call):
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lengths, k_lengths))
    return torch_varlen.documents(
        q, k, v, None, cu_q=cu_q, cu_k=cu_k, max_q=max(q_lengths), max_k=max(k_lengths), **CALL | call
    )


def test_a_document_without_keys_is_zero_with_lse_minus_inf():
    q, k = drawn(3, 2, 64), drawn(2, 2, 64)
    out, lse = documents([2, 1], [2, 0], q, k, k)
    assert out[2].eq(0).all()
    assert lse[:, 2].eq(-torch.inf).all()
    assert lse[:, :2].isfinite().all()


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive(scale):
    q, k = drawn(6, 2, 64), drawn(6, 2, 64)
    out, lse = documents([4, 2], [4, 2], q, k, k, scale=scale, causal=True)
    structure = Packed.from_lengths([4, 2])
    expected, expected_lse = reference_attention(
        q, k, k, structure=structure, scale=scale, causal=True, return_lse=True
    )
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-2, rtol=0)


def test_single_queries_beside_fewer_kv_heads_and_an_empty_document():
    q, k = drawn(2, 4, 64), drawn(6, 2, 64)
    out, _ = documents([1, 0, 1], [2, 1, 3], q, k, k)
    structure = Packed.from_lengths([1, 0, 1], [2, 1, 3])
    expected = reference_attention(q, k, k, structure=structure, scale=0.125)
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=0)


def test_keys_before_every_window_may_hold_nan():
    q, k = drawn(1, 2, 2, 64), drawn(1, 9, 2, 64)
    k[:, :5] = float("nan")  # the queries are at 7 and 8, and see from 5 on
    out, lse = torch_varlen.dense(q, k, k, None, meta=None, options=(), **CALL | {"window": (2, None)})
    assert out.isfinite().all()
    assert lse.isfinite().all()
    kernel = torch_varlen.packed.args[0]
    more = drawn(4, 2, 64)
    cu = {"cu_q": torch.tensor([0, 2, 6]).int(), "cu_k": torch.tensor([0, 9, 13]).int(), "max_q": 4, "max_k": 9}
    keys = torch.cat((k[0], more))
    out, _ = kernel(torch.cat((q[0], more)), keys, keys, None, **cu, **CALL | {"window": (2, None)})
    assert out.isfinite().all()


@pytest.mark.parametrize("window", [(None, 1), (1, None), (4, 4)])
def test_a_window_as_wide_as_the_keys_still_ends_before_them(window):
    q, k, v = drawn(304, 1, 64), drawn(7, 1, 64), drawn(8, 1, 64)[1:]
    out, lse = documents([300, 4], [3, 4], q, k, v, window=window)
    expected, expected_lse = reference_attention(
        q, k, v, structure=Packed.from_lengths([300, 4], [3, 4]), window=window, scale=0.125, return_lse=True
    )
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-2, rtol=0)
    few, one = drawn(1, 5, 1, 64), drawn(1, 1, 1, 64)
    out, _ = torch_varlen.dense(few, one, one, None, meta=None, options=(), **CALL | {"window": window})
    expected = reference_attention(few, one, one, window=window, scale=0.125)
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("window", [None, (1, None)])
def test_no_document_at_all_on_the_device(window):
    cu = torch.zeros(1, dtype=torch.int32)
    q = drawn(3, 2, 64)
    for structure in (
        Packed._build(cu, cu.clone(), max_q=0, max_k=0),
        Packed.from_lengths([], capacity=(0, 3)),
    ):
        meta = structure.bind(torch.device("cpu"), tuple(q.shape), tuple(q.shape))
        out, lse = torch_varlen.packed(q, q, q, None, meta=meta, options=(), **CALL | {"window": window})
        assert out.eq(0).all()
        assert lse.isneginf().all()


def test_a_fake_call_takes_nothing_from_a_real_one_of_its_shape_nor_leaves_it_anything():
    def call() -> torch.Tensor:
        q = torch.zeros(3, 21, 2, 64, dtype=torch.bfloat16)
        return torch_varlen.dense(q, q, q, None, meta=None, options=(), **CALL)[0]

    for _ in range(2):
        assert type(call()) is torch.Tensor
        with FakeTensorMode():
            out = call()
        assert isinstance(out, FakeTensor)
        assert tuple(out.shape) == (3, 21, 2, 64)
        varlen._even.clear()
        with FakeTensorMode():
            call()
        assert not varlen._even
    assert varlen.even_boundaries(3, 21, torch.device("cpu")) is varlen.even_boundaries(3, 21, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_pages_of_256_rows(layout):
    cache = PagedKVCache(4, 256, 1, 64, torch.bfloat16, "cpu")
    rows = drawn(300, 1, 64)
    slots = torch.cat((torch.arange(512, 768), torch.arange(44)))
    cache.write(rows, rows, slots)
    q = drawn(1, 3, 2, 64)
    structure = Paged([[2, 0]], [300], None if layout == "batched" else [3])
    given = q if layout == "batched" else q[0]
    meta = structure.bind(torch.device("cpu"), tuple(given.shape), tuple(cache.k.shape))
    out, lse = torch_varlen.paged(given, cache.k, cache.v, None, meta=meta, options=(), **CALL | {"causal": True})
    expected, expected_lse = reference_attention(
        given, cache.k, cache.v, structure=structure, causal=True, scale=0.125, return_lse=True
    )
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"host": False, "query_layout": "batched"}, "block table on the device"),
        ({"query_layout": "padded"}, "padded queries"),
        ({"query_layout": "batched", "page_size": 64}, "page_size 64"),
    ],
)
def test_pages_that_are_refused(facts, text):
    pool = TensorFacts.contiguous((4, 256, 2, 64), "bfloat16")
    known = {"page_size": 256, **facts}
    asked = Request(
        TensorFacts.contiguous((1, 8, 2, 64), "bfloat16"), pool, pool, device="cuda:0", structure_kind="paged",
        scale=0.125, structure_facts=StructureFacts(**known),
    )  # fmt: skip
    assert isinstance(decision(asked), Rejected)
    reasons = (*torch_varlen.check(asked, H200), *unmet(features("paged"), asked))
    assert any(text in reason for reason in reasons)


def test_gradients_are_those_of_the_reference():
    q, k, v = (drawn(6, 2, 64).requires_grad_() for _ in range(3))
    out, _ = documents([4, 2], [4, 2], q, k, v, causal=True, need_lse=False)
    wanted = reference_attention(q, k, v, structure=Packed.from_lengths([4, 2]), causal=True, scale=0.125)
    down = drawn(6, 2, 64)
    found, expected = (torch.autograd.grad(answer, (q, k, v), down.to(answer.dtype)) for answer in (out, wanted))
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), right.double(), atol=5e-2, rtol=0)
