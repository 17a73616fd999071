"""vllm_xpu over a stand-in of the package: what it is asked, what is made of its answers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import KeyPadding, Packed, Paged
from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_xpu import XpuOptions, vllm_xpu, vllm_xpu_forward, vllm_xpu_pages

BMG = Machine("xpu", "xpu", arch="0x500400400", versions={"vllm-xpu-kernels": "0.1.16.2", "torch": "2.14.0+xpu"})
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": False}
Asked = list[dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the package's function is called with from now on; it answers ones, and NaN where a document has no key."""
    calls: Asked = []

    def stand_in(**given: Any) -> Any:
        calls.append(given)
        out = given["out"].fill_(1.0)
        cu_q, cu_k = given["cu_seqlens_q"], given.get("cu_seqlens_k")
        kept = cu_k.diff() if cu_k is not None else given["seqused_k"]
        for start, stop, keys in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), kept.tolist(), strict=True):
            blind = max(0, stop - start - keys) if given["causal"] else 0
            out[start : stop if keys == 0 else start + blind] = float("nan")
        lse = torch.zeros(out.shape[1], out.shape[0])
        return (out, lse) if given["return_softmax_lse"] else out

    monkeypatch.setattr(vllm_xpu_forward, "operator", lambda: stand_in)
    return calls


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def meta_of(structure: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    return structure.bind(torch.device("cpu"), tuple(q.shape), tuple(k.shape))


def request(kind: str = "dense", *, dim: int = 64, heads: int = 4, kv_heads: int = 4, **facts: Any) -> Request:
    lead = (9,) if kind == "packed" else (2, 9)
    q = TensorFacts.contiguous((*lead, heads, dim), "float16")
    pool = (8, facts["structure_facts"].page_size) if kind == "paged" else lead
    k = TensorFacts.contiguous((*pool, kv_heads, dim), "float16")
    return Request(q, k, k, device="xpu:0", structure_kind=kind, scale=0.125, **facts)


def reasons(made: Request, machine: Machine = BMG) -> str:
    decision = resolve(made, machine, [vllm_xpu.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


def pages(page_size: int = 64, layout: str = "batched", **facts: Any) -> dict[str, Any]:
    return {"structure_facts": StructureFacts(documents=2, page_size=page_size, query_layout=layout, **facts)}


# what is asked


def test_dense_is_documents_of_one_length_by_name_with_the_scale(asked: Asked) -> None:
    q, k = drawn(2, 4, 3, 64), drawn(2, 6, 3, 64)
    out, lse = vllm_xpu_forward.dense(q, k, k, None, meta=None, options=(), **CALL | {"scale": 0.3})
    (given,) = asked
    assert (given["softmax_scale"], given["causal"], given["return_softmax_lse"]) == (0.3, False, False)
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (4, 6)
    assert given["cu_seqlens_q"].tolist() == [0, 4, 8]
    assert given["cu_seqlens_k"].tolist() == [0, 6, 12]
    assert given["cu_seqlens_q"].dtype == torch.int32
    assert given["is_mix_batch"] is False
    assert out.shape == q.shape
    assert lse is None
    assert not {"softcap", "window_size", "seqused_k", "block_table"} & set(given)


@pytest.mark.parametrize(("scale", "sign"), [(-0.5, -1.0), (0.0, 0.0)])
def test_a_scale_of_zero_or_below_is_moved_into_q(asked: Asked, scale: float, sign: float) -> None:
    q = drawn(1, 4, 2, 64)
    vllm_xpu_forward.dense(q, q, q, None, meta=None, options=(), **CALL | {"scale": scale})
    assert asked[0]["softmax_scale"] == (0.5 if scale else 1.0)
    assert torch.equal(asked[0]["q"], (q * sign).flatten(0, 1))


@pytest.mark.parametrize(("dim", "causal", "need_lse", "width", "with_lse"), [
    (64, False, False, 64, False), (80, False, False, 80, False), (80, True, False, 128, False),
    (64, False, True, 128, True), (192, False, False, 192, True), (192, True, False, 192, False),
    (96, True, True, 128, True), (256, False, True, 256, True),
])  # fmt: skip
def test_only_forms_that_the_wheel_has_are_asked_for(
    asked: Asked, dim: int, causal: bool, need_lse: bool, width: int, with_lse: bool
) -> None:
    q = drawn(1, 4, 2, dim)
    call = CALL | {"causal": causal, "need_lse": need_lse}
    out, lse = vllm_xpu_forward.dense(q, q, q, None, meta=None, options=(), **call)
    (given,) = asked
    assert (given["q"].shape[-1], given["return_softmax_lse"]) == (width, with_lse)
    assert out.shape == q.shape
    assert (lse is not None) == need_lse


def test_strided_tensors_are_copied_and_the_callers_buffer_is_filled(asked: Asked) -> None:
    wide = drawn(1, 4, 2, 128)
    q, out = wide[..., ::2], torch.zeros(1, 4, 4, 64).half()[:, :, ::2]
    result, _ = vllm_xpu_forward.dense(q, q, q, out, meta=None, options=(), **CALL)
    assert all(asked[0][name].is_contiguous() for name in "qkv")
    assert result is out
    assert out.eq(1).all()


def test_windows_and_softcaps_never_reach_the_package(asked: Asked) -> None:
    q = drawn(1, 4, 2, 64)
    for wrong in ({"window": (2, 0)}, {"softcap": 5.0}):
        with pytest.raises(ValueError, match="takes no window and no softcap"):
            vllm_xpu_forward.dense(q, q, q, None, meta=None, options=(), **CALL | wrong)
    assert asked == []


# what is made of the answers


def test_documents_without_keys_are_zero_with_an_lse_of_minus_infinity(asked: Asked) -> None:
    q = drawn(3, 2, 128)
    meta = meta_of(Packed.from_lengths([2, 1], [0, 3]), q, q)
    out, lse = vllm_xpu_forward.packed(q, q, q, None, meta=meta, options=(), **CALL | {"need_lse": True})
    assert out[:2].eq(0).all()
    assert out[2:].eq(1).all()
    assert lse[:, :2].isneginf().all()
    assert lse[:, 2].eq(0).all()


@pytest.mark.parametrize("known", ["host", "device"])
def test_causal_rows_before_the_first_key_are_zero(asked: Asked, known: str) -> None:
    q, k = drawn(5, 2, 64), drawn(3, 2, 64)
    ends = torch.tensor([0, 5]), torch.tensor([0, 3])
    if known == "device":
        structure = Packed._build(*(end.int() for end in ends), max_q=5, max_k=3)
    else:
        structure = Packed.from_cu_seqlens(*ends)
    meta = meta_of(structure, q, k)
    out, _ = vllm_xpu_forward.packed(q, k, k, None, meta=meta, options=(), **CALL | {"causal": True})
    assert out[:2].eq(0).all()
    assert out[2:].eq(1).all()


def test_a_nan_of_the_kernels_elsewhere_stays(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = torch.full((6, 2, 64), float("nan")).half()
    monkeypatch.setattr(vllm_xpu_forward, "operator", lambda: lambda **given: answer)
    q = drawn(6, 2, 64)
    meta = meta_of(Packed.from_lengths([3, 3]), q, q)
    out, _ = vllm_xpu_forward.packed(q, q, q, None, meta=meta, options=(), **CALL)
    assert out.isnan().all()


def test_key_padding_packs_kept_keys_and_leaves_padded_rows_zero(asked: Asked) -> None:
    q = drawn(2, 4, 2, 64)
    meta = meta_of(KeyPadding.from_lengths([3, 1], 4, queries="same"), q, q)
    out, _ = vllm_xpu_forward.key_padding(q, q, q, None, meta=meta, options=(), **CALL)
    assert asked[0]["cu_seqlens_k"].tolist() == [0, 3, 4]
    assert out[0, :3].eq(1).all()
    assert out[0, 3:].eq(0).all()
    assert out[1, 1:].eq(0).all()


# pages


def paged_call(lengths: list[int], options: tuple[object, ...] = (), **call: Any) -> torch.Tensor:
    """Two queries a row over pages of 16 whose every row is finite, as the slot answers."""
    pool = drawn(6, 16, 1, 64)
    q = drawn(len(lengths), 2, 2, 64)
    table = [[2, 0, -1], [5, 1, 3]][: len(lengths)]
    structure = Paged(table, lengths)
    out, _ = vllm_xpu_pages.paged(
        q, pool, pool, None, meta=meta_of(structure, q, pool), options=options, **CALL | call
    )  # fmt: skip
    return out


def test_rows_that_end_with_a_step_are_read_where_they_are(asked: Asked) -> None:
    assert paged_call([32, 16]).eq(1).all()
    (given,) = asked
    assert given["seqused_k"].tolist() == [32, 16]
    assert given["block_table"].tolist() == [[2, 0, 0], [5, 1, 3]], "an entry that names no page names one"
    assert given["k"].shape == (6, 16, 1, 64)
    assert "cu_seqlens_k" not in given


def test_rows_that_end_before_are_copied_unless_the_caller_vouches(asked: Asked) -> None:
    paged_call([20, 7])
    assert asked[0]["cu_seqlens_k"].tolist() == [0, 20, 27]
    assert asked[0]["k"].shape == (27, 1, 64)
    paged_call([20, 7], (XpuOptions(finite_pages=True),))
    assert asked[1]["seqused_k"].tolist() == [20, 7]


@pytest.mark.parametrize("options", [(), (XpuOptions(finite_pages=True),)], ids=["copied", "in place"])
def test_a_row_without_keys_is_zero(asked: Asked, options: tuple[object, ...]) -> None:
    out = paged_call([0, 7], options)
    assert out[0].eq(0).all()
    assert out[1].eq(1).all()
    assert paged_call([0, 0], options).eq(0).all()


def test_where_a_row_asks_nothing_pages_are_copied_for_their_kernel_would_write_a_row_for_it(asked: Asked) -> None:
    pool, q = drawn(6, 16, 1, 64), drawn(2, 2, 64)
    for q_lengths, copied in (([2, 0], True), ([1, 1], False)):
        meta = meta_of(Paged([[2, 0], [5, 1]], [32, 16], q_lengths=q_lengths), q, pool)
        vllm_xpu_pages.paged(q, pool, pool, None, meta=meta, options=(), **CALL)
        assert ("block_table" not in asked.pop()) == copied


# what is refused


def test_a_plain_request_is_accepted_also_where_the_device_is_not_known() -> None:
    for machine in (BMG, Machine("xpu", "xpu", versions=BMG.versions)):
        assert reasons(request(), machine) == ""
        assert reasons(request("packed", structure_facts=StructureFacts(documents=3)), machine) == ""
        assert reasons(request("paged", **pages()), machine) == ""


@pytest.mark.parametrize(("arch", "served"), [
    ("0x30f000700", True), ("0x500400400", True), ("0x500800000", True), ("0x501000400", True), ("0x780000400", True),
    ("0x30dc00800", False), ("0x311800400", False), ("0x5004004", True), ("0x0", True), ("", True),
    ("bmg", True), ("PVC", True), ("bmg-g21", True), ("acm-g10", False),
])  # fmt: skip
def test_devices_it_has_kernels_for(arch: str, served: bool) -> None:
    told = reasons(request(), Machine("xpu", "xpu", arch=arch, versions=BMG.versions))
    assert told == "" if served else arch in told


@pytest.mark.parametrize(("facts", "words"), [
    ({"window": (2, 0)}, "window"),
    ({"softcap": 5.0}, "softcap"),
    ({"grad": True}, "gradients"),
    ({"dim": 512}, "head_dim 512"),
    ({"kind": "mask"}, "structure 'mask'"),
    ({"kind": "key_padding", "causal": True, "structure_facts": StructureFacts(prefix=False)}, "would move"),
])  # fmt: skip
def test_what_it_cannot_do_is_told(facts: dict[str, Any], words: str) -> None:
    assert words in reasons(request(facts.pop("kind", "dense"), **facts))


@pytest.mark.parametrize(("facts", "words"), [
    (pages(host=False), "block table on the device"),
    (pages(layout="padded"), "padded queries"),
    (pages(48), "page_size 48 not in"),
    (pages(16) | {"dim": 192, "causal": True}, "no kernel for head_dim 192"),
    (pages() | {"dim": 192}, "causal calls only"),
    (pages() | {"heads": 32, "kv_heads": 1}, "32 query heads on one KV head"),
    (pages() | {"lse": True, "dim": 128}, "LSE"),
])  # fmt: skip
def test_pages_it_cannot_read_are_told(facts: dict[str, Any], words: str) -> None:
    assert words in reasons(request("paged", **facts))
