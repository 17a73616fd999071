"""fa3: what each build can do, and the raw operator's rules, over its emulation on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyattn import KeyPadding, Packed, Quant, Spans, reference_attention
from polyattn.vendor import (
    TORCH_ROWS,
    Accepted,
    Machine,
    Rejected,
    Request,
    StructureFacts,
    TensorFacts,
    reachable,
    resolve,
    walkable,
)
from polyattn_cuda import fa3, fa3_build, fa3_forward, fa3_fp8, fa3_operator, fa3_training
from tests.emulators.cuda import aten_cudnn, fa3_ops, repair

pytestmark = pytest.mark.emulated

H200 = Machine("cuda", "cuda", arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "fa3-fwd": "0.0.3"})
CALL: dict[str, Any] = {
    "causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": True, "options": ()
}  # fmt: skip


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_ops.install()
    aten_cudnn.install()
    fa3_operator.operator.cache_clear()
    for module in (fa3_forward, fa3_fp8):
        monkeypatch.setattr(module, "ROWS", TORCH_ROWS)
        monkeypatch.setattr(module, "repair_documents", repair.repair_documents)
    monkeypatch.setattr(fa3_forward, "repair_samples", repair.repair_samples)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))


def request(dtype: str = "bfloat16", dim: int = 64, **facts: Any) -> Request:
    q = TensorFacts.contiguous((1, 8, 2, dim), dtype)
    return Request(q, q, q, device="cuda:0", scale=facts.pop("scale", dim**-0.5), **facts)


def decision(asked: Request, machine: Machine = H200) -> Accepted | Rejected:
    return resolve(asked, machine, [fa3.backend()])[0]


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=3e-2, rtol=0)


def test_without_a_build_the_registrys_is_described():
    build = fa3_build.installed_build()
    assert (build.package, build.namespace) == ("fa3-fwd", "fa3_fwd")
    assert (build.fp16, build.fp8, build.softcap, build.varlen) == (False, True, True, True)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (request("float16"), "dtype float16 is not supported together with quant=None"),
        (request("float32"), "float32 not in"),
        (request(window=(8, 0)), "window is not supported"),
        (request(dim=260), "head_dim 260 not in"),
        (request(grad=True, lse=True), "gradients (backward) is not supported together with LSE"),
        (request(grad=True, deterministic=True), "(backward) is not supported together with deterministic=True"),
        (request(structure_kind="mask"), "only (dense, key_padding, packed, prefix_kv, spans)"),
        (request(quant="int8"), "quant 'int8' not in (fp8)"),
        (request(structure_kind="key_padding", causal=True, structure_facts=StructureFacts(prefix=False)), "positions"),
    ],
)
def test_a_refusal_names_what_the_build_lacks(asked, word):
    found = decision(asked)
    assert isinstance(found, Rejected)
    assert word in "; ".join(found.reasons)


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        (replace(H200, arch="sm_100"), "sm_100 is none of the architectures"),
        (replace(H200, versions=H200.versions | {"cuda": "12.8"}), "linked against CUDA 13, and this torch has 12.8"),
        (replace(H200, versions={"cuda": "13.0"}), "package fa3-fwd is not installed: pip install fa3-fwd"),
    ],
)
def test_another_machine_is_refused_with_what_it_has(machine, word):
    found = decision(request(), machine)
    assert isinstance(found, Rejected)
    assert word in "; ".join(found.reasons)


def test_fp8_serves_only_whom_it_was_asked_by():
    assert isinstance(decision(request("float16")), Rejected)
    found = decision(request("float16", quant="fp8"))
    assert isinstance(found, Accepted)
    assert found.slot.call == "polyattn_cuda.fa3_fp8:dense"
    assert isinstance(decision(request(quant="int8")), Rejected)
    older = decision(request(quant="fp8"), replace(H200, arch="sm_89"))
    assert "FP8 needs sm_90" in "; ".join(older.reasons)


def test_a_foreign_operator_is_refused_by_its_arguments(monkeypatch):
    monkeypatch.setattr(fa3_operator, "_ARGUMENTS", ("q", "k"))
    with pytest.raises(RuntimeError, match=r"fa3-fwd: torch\.ops\.fa3_fwd\.fwd takes"):
        fa3_operator.operator()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [5, 9, 40])
def test_dense(causal, keys):
    q, k, v = drawn(2, 9, 4, 64), drawn(2, keys, 2, 64), drawn(2, keys, 2, 64)
    out, lse = fa3_forward.dense(q, k, v, None, meta=None, **CALL | {"causal": causal})
    want, want_lse = reference_attention(q, k, v, causal=causal, return_lse=True)
    near(out, want)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive_goes_into_q(scale):
    q, k, v = drawn(1, 6, 2, 64), drawn(1, 7, 2, 64), drawn(1, 7, 2, 64)
    before = q.clone()
    out, _ = fa3_forward.dense(q, k, v, None, meta=None, **CALL | {"scale": scale})
    near(out, reference_attention(q, k, v, scale=scale))
    assert torch.equal(q, before)


def test_what_the_copy_engine_cannot_walk_is_copied_first():
    wide = drawn(1, 6, 2, 72)
    q = wide[..., 4:68]
    assert not walkable(q)
    assert walkable(reachable(q))
    assert walkable(wide[..., 8:])
    assert not walkable(wide.transpose(2, 3))
    out, _ = fa3_forward.dense(q, q, q, None, meta=None, **CALL)
    near(out, reference_attention(q, q, q))


@pytest.mark.parametrize("spare", [8, 4])
def test_the_callers_buffer_is_written_and_returned(spare):
    q = drawn(1, 6, 2, 64)
    out = torch.full((1, 6, 2, 64 + spare), float("nan")).bfloat16()[..., :64]
    result, _ = fa3_forward.dense(q, q, q, out, meta=None, **CALL)
    assert result is out
    near(out, reference_attention(q, q, q))


def test_bound_to_a_shape_it_answers_alike():
    q, k, v = drawn(2, 9, 4, 64), drawn(2, 12, 2, 64), drawn(2, 12, 2, 64)
    asked = Request(facts_of(q), facts_of(k), facts_of(v), device="cuda:0", scale=0.125, lse=True, causal=True)
    bound = fa3_forward.bound_dense(asked, ())
    assert bound is not None
    for got, want in zip(
        bound(q, k, v, None, meta=None),
        fa3_forward.dense(q, k, v, None, meta=None, **CALL | {"causal": True}),
        strict=True,
    ):
        assert torch.equal(got, want)
    odd = torch.empty(q.numel() + 4).bfloat16()[4:].view_as(q).copy_(q)  # the same strides, 8 bytes further
    near(bound(odd, k, v, None, meta=None)[0], bound(q, k, v, None, meta=None)[0])


@pytest.mark.parametrize("changed", [{"scale": 0.0}, {"out": True}, {"autocast_dtype": "bfloat16"}])
def test_what_binding_does_not_serve_is_left_to_the_slot(changed):
    assert fa3_forward.bound_dense(request(**changed), ()) is None


@pytest.mark.parametrize("queries", ["same", "all"])
def test_prefixes_run_in_place_and_padded_rows_are_zero(queries):
    q, k, v = (drawn(3, 20, 2, 64) for _ in range(3))
    k[1, 7:] = v[1, 7:] = float("nan")
    structure = KeyPadding.from_lengths([20, 7, 0], 20, queries=queries)
    meta = structure.bind(q.device, q.shape, k.shape)
    out, lse = fa3_forward.key_padding(q, k, v, None, meta=meta, **CALL)
    want, want_lse = reference_attention(q, k, v, structure=structure, return_lse=True)
    near(out, want)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-2, rtol=0)
    if queries == "same":
        assert bool(out[1, 7:].eq(0).all())


def test_a_neighbours_nan_stays_in_its_document():
    q, k, v = (drawn(30, 2, 64) for _ in range(3))
    v[10:20] = float("nan")
    structure = Packed.from_lengths([10, 10, 10])
    out, _ = fa3_forward.packed(q, k, v, None, meta=structure.bind(q.device, q.shape, k.shape), **CALL)
    assert bool(out[:10].isfinite().all() & out[20:].isfinite().all() & out[10:20].isnan().all())


def test_one_document_is_dense_attention_on_views():
    q, k, v = (drawn(30, 2, 64) for _ in range(3))
    structure = Packed.real_and_pad(22, 30)
    v[22:] = float("nan")
    out, lse = fa3_forward.packed(q, k, v, None, meta=structure.bind(q.device, q.shape, k.shape), **CALL)
    near(out[:22], reference_attention(q[None, :22], k[None, :22], v[None, :22])[0])
    assert bool(out[22:].eq(0).all() & lse[:, 22:].isneginf().all())


def test_spans_are_written_straight_into_the_buffer():
    q, k, v = (drawn(2, 24, 2, 64) for _ in range(3))
    structure = Spans([[(4, 12)], [(4, 12)]])
    out = torch.full_like(q, float("nan"))
    meta = structure.bind(q.device, q.shape, k.shape)
    result, _ = fa3_forward.spans(q, k, v, out, meta=meta, **CALL | {"causal": True})
    assert result is out
    near(out, reference_attention(q, k, v, structure=structure))


@pytest.mark.parametrize(("queries", "keys", "causal"), [(9, 9, True), (5, 9, True), (9, 5, True), (9, 12, False)])
def test_gradients_are_cudnns_on_squares_where_causal(queries, keys, causal):
    q, k, v = drawn(1, queries, 4, 64), drawn(1, keys, 2, 64), drawn(1, keys, 2, 64)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    upstream = drawn(1, queries, 4, 64)
    out, lse = fa3_training.dense(q, k, v, None, meta=None, **CALL | {"causal": causal, "need_lse": False})
    assert lse is None
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    want = reference_attention(*exact, causal=causal)
    near(out, want)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    for got, right in zip(found, torch.autograd.grad(want, exact, upstream.double()), strict=True):
        torch.testing.assert_close(got.double(), right, atol=6e-2, rtol=0)


def test_a_single_key_has_all_the_weight_and_no_gradient_for_queries():
    q, k, v = drawn(1, 1, 2, 64), drawn(1, 1, 2, 64), drawn(1, 1, 2, 64)
    q.requires_grad_()
    out, _ = fa3_training.dense(q, k, v, None, meta=None, **CALL | {"need_lse": False})
    near(out, v)
    assert bool(torch.autograd.grad(out.sum(), q)[0].eq(0).all())


def test_fp8_gives_its_scales_to_the_operator(monkeypatch):
    from types import SimpleNamespace

    q, k, v = (drawn(1, 32, 2, 64) for _ in range(3))
    asked = []

    def batched(q, k, v, rotate, used_q, used_k):
        asked.append((rotate, used_q, used_k))
        small = [tensor.float().clamp(-400, 400).to(torch.float8_e4m3fn) for tensor in (q, k, v)]
        one = torch.ones(1, 2)
        return SimpleNamespace(q=small[0], k=small[1], v=small[2], q_descale=one, k_descale=one, v_descale=one)

    monkeypatch.setattr(fa3_fp8.quantise, "batched", batched)
    out, _ = fa3_fp8.dense(q, k, v, None, meta=None, **CALL | {"options": (Quant("fp8", rotate=False),)})
    assert asked == [(False, None, None)]
    want = reference_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - want.double()).norm() / want.double().norm()) < 0.1
