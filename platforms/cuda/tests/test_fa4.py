"""fa4: what it takes, its own words for windows and lengths, and what it repairs, over its functions emulated."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from polyattn import KeyPadding, Packed, reference_attention
from polyattn.vendor import TORCH_ROWS, Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve
from polyattn_cuda import fa4, fa4_package
from tests.emulators.cuda import fa4 as emulator

pytestmark = pytest.mark.emulated

CPU = torch.device("cpu")
VERSIONS = {"flash-attn-4": "4.0.0b36"}
H200 = Machine("cuda", "cuda", arch="sm_90", versions=VERSIONS)
B200 = Machine("cuda", "cuda", arch="sm_100", versions=VERSIONS)
CALL: dict[str, Any] = {
    "causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": True, "options": (),
}  # fmt: skip


@pytest.fixture
def package(monkeypatch):
    """The package's functions; rows are moved and documents repaired by torch, what was repaired is written down."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flash_attn"}
    emulator.install()
    fa4_package.functions.cache_clear()
    repaired: list[dict[str, Any]] = []
    for name in ("repair_documents", "repair_samples"):
        monkeypatch.setattr(fa4, name, lambda *tensors, **call: repaired.append(call))
    monkeypatch.setattr(fa4, "ROWS", TORCH_ROWS)
    yield repaired
    fa4_package.functions.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(kept)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def request(kind: str = "dense", *, dim: int = 64, v_dim: int | None = None, **facts: Any) -> Request:
    q = TensorFacts.contiguous((1, 8, 2, dim), "bfloat16")
    v = TensorFacts.contiguous((1, 8, 2, v_dim or dim), "bfloat16")
    return Request(q, q, v, device="cuda:0", structure_kind=kind, scale=dim**-0.5, **facts)


def decision(asked: Request, machine: Machine = H200) -> Accepted | Rejected:
    return resolve(asked, machine, [fa4.backend()])[0]


@pytest.mark.parametrize(
    ("machine", "dim", "v_dim", "taken"),
    [
        (H200, 256, 256, True), (H200, 192, 128, True), (H200, 136, 136, True), (H200, 60, 60, False),
        (B200, 128, 64, True), (B200, 192, 128, True), (B200, 256, 256, True), (B200, 136, 136, False),
        (B200, 192, 192, False),
        (Machine("cuda", "cuda", arch="sm_103", versions=VERSIONS), 64, 64, True),
        (Machine("cuda", "cuda", arch="sm_89", versions=VERSIONS), 64, 64, False),
        (Machine("cuda", "cuda", arch="sm_120", versions=VERSIONS), 64, 64, False),
        (Machine("cuda", "cuda", arch="sm_90", versions={"flash-attn-4": "4.0.0b29"}), 64, 64, False),
    ],
)  # fmt: skip
def test_head_dims_of_each_architecture(machine, dim, v_dim, taken):
    assert isinstance(decision(request(dim=dim, v_dim=v_dim), machine), Accepted) == taken


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn"])
def test_half_precision_only(dtype):
    facts = TensorFacts.contiguous((1, 8, 2, 64), dtype)
    assert isinstance(decision(Request(facts, facts, facts, device="cuda:0", scale=0.125)), Rejected)


@pytest.mark.parametrize(
    ("asked", "slot"),
    [
        ({}, "dense"),
        ({"lse": True, "deterministic": True}, "dense"),
        ({"grad": True, "lse": True}, "dense_grad"),
        ({"grad": True, "deterministic": True}, "dense_grad_steady"),
    ],
)
def test_the_slot_is_the_fastest_that_has_what_is_asked(asked, slot):
    answer = decision(request(**asked))
    assert isinstance(answer, Accepted)
    assert answer.slot.name == slot


def test_gradients_of_documents_go_by_lengths_on_the_host_and_holes_have_none():
    known, unknown = (StructureFacts(documents=2, host=host) for host in (True, False))
    assert isinstance(decision(request("packed", structure_facts=unknown)), Accepted)
    assert isinstance(decision(request("packed", structure_facts=unknown, grad=True)), Rejected)
    windowed = decision(request("packed", structure_facts=known, grad=True, window=(2, 2)))
    assert isinstance(windowed, Accepted)
    assert windowed.slot.name == "packed_grad"
    room = StructureFacts(documents=2, capacity=True)
    assert isinstance(decision(request("packed", structure_facts=room, capturing=True)), Accepted)
    assert isinstance(decision(request("packed", structure_facts=room, capturing=True, grad=True)), Rejected)
    prefixes, holes = (StructureFacts(queries="same", prefix=known) for known in (True, False))
    assert isinstance(decision(request("key_padding", structure_facts=prefixes, grad=True)), Accepted)
    assert isinstance(decision(request("key_padding", structure_facts=holes)), Accepted)
    assert isinstance(decision(request("key_padding", structure_facts=holes, grad=True)), Rejected)


def test_gradients_of_a_document_feel_nothing_of_its_neighbours(package):
    q, k, v = (drawn(9, 2, 64) for _ in range(3))
    structure = Packed.from_lengths([4, 3])
    meta = structure.bind(CPU, tuple(q.shape), tuple(q.shape))
    for tensor in (q, k, v):
        tensor[4:] = float("nan")
    given = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, _ = fa4.packed_grad(*given, None, meta=meta, **CALL)
    first = [tensor.detach()[:4].unsqueeze(0).requires_grad_() for tensor in given]
    want = reference_attention(*first, scale=0.125)
    close(out[:4], want[0])
    found = torch.autograd.grad(out.float().sum(), given)
    for got, right in zip(found, torch.autograd.grad(want.sum(), first), strict=True):
        close(got[:4], right[0])


@pytest.mark.parametrize("window", [(2, None), (None, 1), (0, 0), (3, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_one_side_of_a_window_may_be_unbounded(package, window, grad):
    q, k = drawn(2, 5, 4, 64).requires_grad_(grad), drawn(2, 7, 2, 64)
    slot = fa4.dense_grad if grad else fa4.dense
    out, lse = slot(q, k, k, None, meta=None, **CALL | {"window": window})
    want, want_lse = reference_attention(q, k, k, scale=0.125, window=window, return_lse=True)
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("window", [(None, 1), (1, None), (4, 4)])
def test_a_window_as_wide_as_the_keys_still_ends_before_them(package, window):
    q, k = drawn(24, 1, 64), drawn(7, 1, 64)
    structure = Packed.from_lengths([20, 4], [3, 4])
    meta = structure.bind(CPU, tuple(q.shape), tuple(k.shape))
    out, _ = fa4.packed(q, k, k, None, meta=meta, **CALL | {"window": window})
    close(out, reference_attention(q, k, k, structure=structure, window=window, scale=0.125))


def test_sides_beyond_32_bits_are_brought_within_them(package, monkeypatch):
    given: list[Any] = []
    real = fa4.functions()
    monkeypatch.setattr(
        fa4, "functions",
        lambda: real._replace(
            forward=lambda **call: (given.append((call["window_size_left"], call["window_size_right"])),
                                    real.forward(**call))[1],
            dense=lambda **call: (given.append(call["window_size"]), real.dense(**call))[1],
        ),
    )  # fmt: skip
    q = drawn(1, 5, 2, 64)
    for slot in (fa4.dense, fa4.dense_grad):
        out, _ = slot(q, q, q, None, meta=None, **CALL | {"window": (2**40, 2**31)})
        close(out, reference_attention(q, q, q, scale=0.125))
    assert given == [(2**30, 2**30)] * 2


@pytest.mark.parametrize("window", [None, (1, None)])
def test_no_document_at_all_on_the_device(package, window):
    cu = torch.zeros(1, dtype=torch.int32)
    q = drawn(3, 2, 64)
    for structure in (Packed._build(cu, cu.clone(), max_q=0, max_k=0), Packed.from_lengths([], capacity=(0, 3))):
        meta = structure.bind(CPU, tuple(q.shape), tuple(q.shape))
        out, lse = fa4.packed(q, q, q, None, meta=meta, **CALL | {"window": window})
        assert out.eq(0).all()
        assert lse.isneginf().all()


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive(package, scale):
    q, k = drawn(1, 5, 2, 64), drawn(1, 5, 2, 64)
    out, _ = fa4.dense(q, k, k, None, meta=None, **CALL | {"scale": scale, "causal": True})
    close(out, reference_attention(q, k, k, scale=scale, causal=True))


def test_keys_before_every_window_may_hold_nan(package):
    q, k = drawn(1, 2, 2, 64), drawn(1, 9, 2, 64)
    k[:, :5] = float("nan")  # the queries are at 7 and 8, and see from 5 on
    out, lse = fa4.dense(q, k, k, None, meta=None, **CALL | {"window": (2, None)})
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("wide", [64, 68])
def test_the_callers_buffer_is_written_whether_or_not_its_rows_are_aligned(package, wide):
    q = drawn(1, 5, 2, 64)
    out = torch.full((1, 5, 2, wide), float("nan"), dtype=q.dtype)[..., :64]
    got, _ = fa4.dense(q, q, q, out, meta=None, **CALL)
    assert got is out
    close(out, reference_attention(q, q, q, scale=0.125))


def test_the_lse_is_there_only_when_asked(package):
    q = drawn(1, 5, 2, 64).requires_grad_()
    assert fa4.dense_grad(q, q, q, None, meta=None, **CALL | {"need_lse": False})[1] is None
    with torch.no_grad():
        assert fa4.dense(q, q, q, None, meta=None, **CALL | {"need_lse": False})[1] is None


@pytest.mark.parametrize("queries", ["same", "all"])
def test_prefixes_run_in_place_and_are_repaired(package, queries):
    q, k, v = drawn(2, 7, 4, 64), drawn(2, 7, 2, 64), drawn(2, 7, 2, 64)
    structure = KeyPadding.from_lengths([7, 4], 7, queries=queries)
    meta = structure.bind(CPU, tuple(q.shape), tuple(k.shape))
    out, lse = fa4.key_padding(q, k, v, None, meta=meta, **CALL)
    want, want_lse = reference_attention(q, k, v, structure=structure, scale=0.125, return_lse=True)
    close(out, want)
    close(lse, want_lse)
    (repair,) = package
    assert repair["used_k"].tolist() == [7, 4]
    assert repair["used_q"] is None if queries == "all" else repair["used_q"].tolist() == [7, 4]
    assert repair["reach"] >= 144


def test_documents_are_repaired(package):
    q = drawn(9, 2, 64)
    structure = Packed.from_lengths([4, 3])
    meta = structure.bind(CPU, tuple(q.shape), tuple(q.shape))
    out, lse = fa4.packed(q, q, q, None, meta=meta, **CALL | {"causal": True})
    want, want_lse = reference_attention(q, q, q, structure=structure, scale=0.125, causal=True, return_lse=True)
    close(out, want)
    close(lse, want_lse)
    assert out[7:].eq(0).all()
    assert package[0]["cu_k"].tolist() == [0, 4, 7]


@pytest.mark.parametrize("queries", ["same", "all"])
@pytest.mark.parametrize("slot", ["key_padding_grad", "key_padding_grad_steady"])
def test_gradients_of_prefixes_feel_nothing_behind_them(package, queries, slot):
    q, k, v = (drawn(2, 7, 2, 64) for _ in range(3))
    structure = KeyPadding.from_lengths([7, 4], 7, queries=queries)
    meta = structure.bind(CPU, tuple(q.shape), tuple(k.shape))
    k[1, 4:], v[1, 4:] = float("nan"), float("inf")
    if queries == "same":
        q[1, 4:] = float("nan")
    given = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = getattr(fa4, slot)(*given, None, meta=meta, **CALL)
    found = torch.autograd.grad(out.float().sum() + lse[lse.isfinite()].sum(), given)
    clean = [tensor.detach().nan_to_num(0, 0, 0).requires_grad_() for tensor in given]
    want, want_lse = reference_attention(*clean, structure=structure, scale=0.125, return_lse=True)
    expected = torch.autograd.grad(want.sum() + want_lse[want_lse.isfinite()].sum(), clean)
    for got, right in zip(found, expected, strict=True):
        close(got, right)


def test_the_steady_backward_says_so(package, monkeypatch):
    asked: list[bool] = []
    real = fa4.functions()

    def dense(**call: Any) -> Any:
        asked.append(call["deterministic"])
        return real.dense(**call)

    monkeypatch.setattr(fa4, "functions", lambda: real._replace(dense=dense))
    q = drawn(1, 5, 2, 64).requires_grad_()
    fa4.dense_grad(q, q, q, None, meta=None, **CALL)
    fa4.dense_grad_steady(q, q, q, None, meta=None, **CALL)
    assert asked == [False, True]


def test_the_vendor_leaves_rows_past_the_used_ones_unwritten(package):
    cute = sys.modules["flash_attn.cute"]
    q, used = drawn(2, 4, 1, 64), torch.tensor([4, 1], dtype=torch.int32)
    out, lse = cute.flash_attn_varlen_func(q, q, q, seqused_q=used, seqused_k=used, return_lse=True)
    assert out[1, 1:].isnan().all()
    assert lse[1, :, 1:].isnan().all()


def test_the_vendor_spoils_a_sample_by_nan_behind_its_used_keys(package):
    cute = sys.modules["flash_attn.cute"]
    q, v = drawn(2, 200, 1, 64), drawn(2, 200, 1, 64)
    used = torch.tensor([100, 150], dtype=torch.int32)
    v[0, 110] = float("nan")  # in the tile of key 99
    v[1, 199] = float("nan")  # in the tile of key 149
    out, _ = cute.flash_attn_varlen_func(q, q, v, seqused_k=used)
    assert out.isnan().all()
    v[0, 110] = 0.0
    v[0, 130] = float("nan")  # beyond it
    out, _ = cute.flash_attn_varlen_func(q, q, v, seqused_k=used)
    assert out[0].isfinite().all()


def test_the_vendor_has_an_lse_of_minus_inf_where_there_is_no_key_at_all(package):
    cute = sys.modules["flash_attn.cute"]
    q = drawn(1, 3, 1, 64)
    out, lse = cute.flash_attn_func(q, q[:, :0], q[:, :0], return_lse=True)
    assert out.eq(0).all()
    assert lse.isneginf().all()
