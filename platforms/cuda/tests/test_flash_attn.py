"""flash_attn: FlashAttention 2's rules and traps, over its real Python package on an extension emulated on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn import Packed, Paged, PagedKVCache, reference_attention
from polyattn.vendor import (
    Accepted,
    Machine,
    Rejected,
    Request,
    StructureFacts,
    TensorFacts,
    flash2,
    flash2_calls,
    resolve,
    unmet,
)
from polyattn_cuda import flash_attn

pytestmark = pytest.mark.emulated

VERSIONS = {"flash-attn": "2.8.3.post2"}
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": True}


def machine(arch: str = "sm_90", version: str = VERSIONS["flash-attn"]) -> Machine:
    return Machine("cuda", "cuda", arch=arch, versions={"flash-attn": version})


@pytest.fixture
def package():
    """The package, on the emulated extension; a name of FlashAttention 4's that is in its place is put back after."""
    folders = [Path(folder) for folder in os.environ.get("EMULATED_PACKAGES", "").split(os.pathsep) if folder]
    folder = next((folder for folder in folders if (folder / "flash_attn").is_dir()), None)
    if folder is None and importlib.util.find_spec("flash_attn") is None:
        pytest.skip(
            "flash-attn's Python package is not here (FLASH_ATTENTION_FORCE_BUILD=TRUE "
            "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps flash-attn einops; or "
            "EMULATED_PACKAGES=FOLDER that has it)"
        )
    kept = list(sys.path)
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    from tests.emulators.cuda import flash_attn_2_cuda

    flash_attn_2_cuda.install()
    yield importlib.import_module("flash_attn.flash_attn_interface")
    sys.path[:] = kept  # other vendors' packages lie in that folder too


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def request(kind: str = "dense", *, heads: int = 2, dim: int = 64, **facts: Any) -> Request:
    q = TensorFacts.contiguous((1, 8, 2, dim), "bfloat16")
    k = TensorFacts.contiguous((1, 8, heads, dim), "bfloat16")
    return Request(q, k, k, device="cuda:0", structure_kind=kind, scale=dim**-0.5, **facts)


def decision(asked: Request, on: Machine | None = None) -> Accepted | Rejected:
    return resolve(asked, on or machine(), [flash_attn.backend()])[0]


@pytest.mark.parametrize(
    ("on", "text"),
    [
        (Machine("cuda", "cuda", arch="sm_90"), "not installed"),
        (machine(version="2.5.8"), "older than 2.8"),
        (machine("sm_75"), "sm_75"),
    ],
)
def test_refused_machines(on, text):
    answer = decision(request(), on)
    assert isinstance(answer, Rejected)
    assert text in " ".join(answer.reasons)


def test_a_package_without_its_extension_is_a_reason(monkeypatch, tmp_path):
    info = tmp_path / "flash_attn-2.8.3.post2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3.post2\n")
    with monkeypatch.context() as patch:  # pytest looks for packages of its own afterwards
        patch.delitem(sys.modules, "flash_attn_2_cuda", raising=False)
        patch.setattr(sys, "path", [str(tmp_path)])
        problem = flash_attn.missing_extension()
    assert "flash_attn_2_cuda" in problem
    monkeypatch.setattr(flash_attn, "BROKEN", problem)
    assert problem not in str(decision(request())), "of this process, not of a machine that is described"
    monkeypatch.setattr(flash_attn, "is_here", lambda *_: True)
    answer = decision(request())
    assert isinstance(answer, Rejected)
    assert problem in answer.reasons


@pytest.mark.parametrize(
    ("asked", "slot"),
    [
        ({"lse": True, "deterministic": True}, "dense"),
        ({"grad": True}, "dense"),
        ({"grad": True, "deterministic": True}, "dense_steady"),
        ({"grad": True, "lse": True}, None),
    ],
)
def test_the_slot_is_the_fastest_that_has_what_is_asked(asked, slot):
    answer = decision(request(**asked))
    assert (answer.slot.name if isinstance(answer, Accepted) else None) == slot


@pytest.mark.parametrize(("arch", "taken"), [("sm_80", True), ("sm_90", True), ("sm_89", False), ("sm_120", False)])
def test_gradients_of_wide_heads_by_architecture(arch, taken):
    assert isinstance(decision(request(dim=256, grad=True), machine(arch)), Accepted) == taken
    assert isinstance(decision(request(dim=256), machine(arch)), Accepted)
    assert isinstance(decision(request(dim=192, grad=True), machine(arch)), Accepted)


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
    asked = Request(
        TensorFacts.contiguous((1, 8, 2, 64), "bfloat16"), pool, pool, device="cuda:0", structure_kind="paged",
        scale=0.125, structure_facts=StructureFacts(**{"page_size": 256, **facts}),
    )  # fmt: skip
    assert isinstance(decision(asked), Rejected)
    over_pages = next(s.features for s in flash_attn.backend().slots if "paged" in s.features.kinds)
    reasons = (*flash_attn.check(asked, machine()), *unmet(over_pages, asked))
    assert any(text in reason for reason in reasons)


@pytest.mark.parametrize(
    ("causal", "window", "sides"),
    [
        (False, None, (-1, -1)),
        (True, None, (-1, 0)),
        (True, (4, 0), (4, 0)),
        (False, (3, None), (3, -1)),
        (False, (2**40, 2**31), (2**30, 2**30)),
    ],
)
def test_a_window_in_the_packages_words(causal, window, sides):
    asked = flash2_calls.asked(False, causal, 0.5, window, 1.5, True)
    assert asked["window_size"] == sides
    assert (asked["causal"], asked["softcap"], asked["dropout_p"]) == (causal, 1.5, 0.0)


def documents(q_lengths, k_lengths, q, k, v, *, deterministic=False, **call):
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lengths, k_lengths))
    return flash_attn.documents(
        deterministic, q, k, v, None, cu_q=cu_q, cu_k=cu_k, max_q=max(q_lengths), max_k=max(k_lengths), **CALL | call
    )


def test_the_vendor_says_plus_inf_where_a_row_sees_nothing_and_we_do_not(package):
    q, k = drawn(1, 5, 2, 64), drawn(1, 2, 2, 64)
    assert package.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1][0, :, :3].isposinf().all()
    out, lse = flash_attn.dense(q, k, k, None, meta=None, options=(), **CALL | {"causal": True})
    want, want_lse = reference_attention(q, k, k, causal=True, scale=0.125, return_lse=True)
    close(out, want)
    close(lse, want_lse)
    out, lse = documents([2, 1], [2, 0], q[0, :3], k[0], k[0])
    assert out[2].eq(0).all()
    assert lse[:, 2].isneginf().all()


def test_single_queries_beside_fewer_kv_heads_and_an_empty_document(package):
    q, k = drawn(2, 4, 64), drawn(6, 2, 64)
    cu_q, cu_k = torch.tensor([0, 1, 1, 2]).int(), torch.tensor([0, 2, 3, 6]).int()
    with pytest.raises(RuntimeError, match="reshape"):
        package.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 1, 3)
    out, _ = documents([1, 0, 1], [2, 1, 3], q, k, k)
    structure = Packed.from_lengths([1, 0, 1], [2, 1, 3])
    close(out, reference_attention(q, k, k, structure=structure, scale=0.125))


def test_no_query_at_all_never_reaches_the_vendor(package):
    q = drawn(3, 2, 64)
    nothing = torch.tensor([0, 0]).int()
    with pytest.raises(RuntimeError, match="empty grid"):
        package.flash_attn_varlen_func(q[:0], q, q, nothing, torch.tensor([0, 3]).int(), 0, 3)
    structure = Packed.from_lengths([0, 0], [0, 0])
    meta = structure.bind(torch.device("cpu"), tuple(q.shape), tuple(q.shape))
    out, lse = flash_attn.packed(q, q, q, None, meta=meta, options=(), **CALL)
    assert out.eq(0).all()
    assert lse.isneginf().all()


def test_the_vendor_drops_the_gradient_of_its_lse_without_a_word(package):
    q = drawn(1, 5, 2, 64).requires_grad_()
    _, lse, _ = package.flash_attn_func(q, q, q, return_attn_probs=True)
    assert lse.requires_grad
    assert torch.autograd.grad(lse.sum(), q)[0].eq(0).all()


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive(package, scale):
    q, k = drawn(6, 2, 64), drawn(6, 2, 64)
    out, lse = documents([4, 2], [4, 2], q, k, k, scale=scale, causal=True)
    structure = Packed.from_lengths([4, 2])
    want, want_lse = reference_attention(q, k, k, structure=structure, scale=scale, causal=True, return_lse=True)
    close(out, want)
    close(lse, want_lse)


def test_keys_before_every_window_may_hold_nan(package):
    q, k = drawn(1, 2, 2, 64), drawn(1, 9, 2, 64)
    k[:, :5] = float("nan")  # the queries are at 7 and 8, and see from 5 on
    out, lse = flash_attn.dense(q, k, k, None, meta=None, options=(), **CALL | {"window": (2, None)})
    assert out.isfinite().all()
    assert lse.isfinite().all()


#: Windows as wide as there are keys, over more queries: the rows before the first key keep the window they have.
WIDE = [((None, 1), [5], [1]), ((1, None), [5], [1]), ((4, 4), [300, 4], [3, 4]), ((2, None), [9, 2], [3, 1])]


@pytest.mark.parametrize(("window", "lengths_q", "lengths_k"), WIDE)
def test_a_window_as_wide_as_the_keys_still_ends_before_them(package, window, lengths_q, lengths_k):
    q, k, v = drawn(sum(lengths_q), 1, 64), drawn(sum(lengths_k), 1, 64), drawn(sum(lengths_k) + 1, 1, 64)[1:]
    out, lse = documents(lengths_q, lengths_k, q, k, v, window=window)
    structure = Packed.from_lengths(lengths_q, lengths_k)
    want, want_lse = reference_attention(
        q, k, v, structure=structure, window=window, scale=0.125, return_lse=True
    )  # fmt: skip
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("window", [(None, 1), (1, None), (0, 2)])
@pytest.mark.parametrize("slot", [flash_attn.dense, flash_attn.dense_steady])
def test_dense_windows_over_fewer_keys_than_queries(package, window, slot):
    q, k, v = drawn(2, 5, 4, 64), drawn(2, 1, 2, 64), drawn(2, 1, 2, 64) + 1
    out = torch.empty(2, 5, 4, 64, dtype=q.dtype)
    got, lse = slot(q, k, v, out, meta=None, options=(), **CALL | {"window": window})
    want, want_lse = reference_attention(q, k, v, window=window, scale=0.125, return_lse=True)
    assert got is out
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize(
    ("window", "max_q", "max_k", "stated"),
    [(None, 9, 4, 4), ((None, 4), 9, 4, 9), ((2, None), 9, 4, 9), ((4, 4), 2, 4, 4), ((1, 1), 9, 0, 0)],
)
def test_the_most_keys_stated_are_no_less_than_the_queries_that_a_window_is_over(window, max_q, max_k, stated):
    assert flash2.most_keys(window, max_q, max_k) == stated


@pytest.mark.parametrize("boundaries", ["fixed", "capacity"])
@pytest.mark.parametrize("window", [None, (1, None)])
def test_no_document_at_all_on_the_device(package, boundaries, window):
    q = drawn(3, 2, 64).requires_grad_(boundaries == "fixed")
    structure = nothing_on_the_device() if boundaries == "fixed" else Packed.from_lengths([], capacity=(0, 3))
    meta = structure.bind(torch.device("cpu"), tuple(q.shape), tuple(q.shape))
    out, lse = flash_attn.packed(q, q, q, None, meta=meta, options=(), **CALL | {"window": window})
    assert out.eq(0).all()
    assert lse.isneginf().all()
    with torch.no_grad():
        place = torch.full_like(q, 7.0)
        assert flash_attn.packed(q, q, q, place, meta=meta, options=(), **CALL)[0] is place
    assert place.eq(0).all()


def nothing_on_the_device() -> Packed:
    """Boundaries of no document, which the host does not know: two tensors."""
    cu = torch.zeros(1, dtype=torch.int32)
    return Packed._build(cu, cu.clone(), max_q=0, max_k=0)


@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_pages_of_256_rows(package, layout):
    cache = PagedKVCache(4, 256, 1, 64, torch.bfloat16, "cpu")
    rows = drawn(300, 1, 64)
    cache.write(rows, rows, torch.cat((torch.arange(512, 768), torch.arange(44))))
    q = drawn(1, 3, 2, 64)
    structure = Paged([[2, 0]], [300], None if layout == "batched" else [3])
    given = q if layout == "batched" else q[0]
    meta = structure.bind(torch.device("cpu"), tuple(given.shape), tuple(cache.k.shape))
    out, lse = flash_attn.paged(given, cache.k, cache.v, None, meta=meta, options=(), **CALL | {"causal": True})
    want, want_lse = reference_attention(
        given, cache.k, cache.v, structure=structure, causal=True, scale=0.125, return_lse=True
    )
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_those_of_the_reference_and_the_flag_reaches_the_extension(package, monkeypatch, deterministic):
    extension = sys.modules["flash_attn_2_cuda"]
    flags: list[bool] = []
    real = extension.varlen_bwd

    def varlen_bwd(*given: Any) -> Any:
        flags.append(given[-3])
        return real(*given)

    monkeypatch.setattr(extension, "varlen_bwd", varlen_bwd)
    q, k, v = (drawn(6, 2, 64).requires_grad_() for _ in range(3))
    out, _ = documents([4, 2], [4, 2], q, k, v, causal=True, need_lse=False, deterministic=deterministic)
    want = reference_attention(q, k, v, structure=Packed.from_lengths([4, 2]), causal=True, scale=0.125)
    down = drawn(6, 2, 64)
    found, expected = (torch.autograd.grad(answer, (q, k, v), down.to(answer.dtype)) for answer in (out, want))
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), right.double(), atol=5e-2, rtol=0)
    assert flags == [deterministic]
