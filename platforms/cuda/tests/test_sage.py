"""sage: what SageAttention gets from us, in both releases, over its emulation on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polyattn import Packed, PolyattnWarning, reference_attention
from polyattn.vendor import Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve
from polyattn_cuda import sage
from tests.emulators.cuda import sage as emulator

pytestmark = pytest.mark.emulated

CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": False}


@pytest.fixture(params=["1.0.6", "2.2.0"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    emulator.install(request.param)
    monkeypatch.setattr(sage, "_release", lambda: int(request.param[0]))
    sage._function.cache_clear()
    yield request.param
    sage._function.cache_clear()
    emulator.install("1.0.6")
    emulator.uninstall()


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def decision(version: str, kind: str = "dense", arch: str = "sm_90", head_dim: int = 64, **asked: Any) -> Any:
    facts = asked.pop("structure_facts", StructureFacts())
    tensor = TensorFacts.contiguous((1, asked.pop("length", 64), 2, head_dim), asked.pop("dtype", "bfloat16"))
    request = Request(tensor, tensor, tensor, device="cuda:0", structure_kind=kind, structure_facts=facts, **asked)
    machine = Machine("cuda", "cuda", arch=arch, versions={"sageattention": version})
    return resolve(request, machine, [sage.backend()])[0]


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the error of int8 scores, and not nearer than they can come."""
    error = (found.double() - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (5, 9), (9, 5), (1, 4), (300, 200)])
@pytest.mark.parametrize("causal", [False, True])
def test_causal_is_bottom_right_at_any_sizes(release: str, queries: int, keys: int, causal: bool) -> None:
    q, k, v = drawn(2, queries, 4, 64), drawn(2, keys, 2, 64), drawn(2, keys, 2, 64) + 0.5
    out, _ = sage.dense(q, k, v, None, meta=None, options=(), **CALL | {"causal": causal})
    want, lse = reference_attention(q.double(), k.double(), v.double(), causal=causal, return_lse=True)
    near(out, want)
    assert out.transpose(1, 2)[lse.isneginf()].eq(0).all()


UNQUANTISED = "ignore:cuda.sage runs a piece of a larger call unquantised"


def test_a_piece_that_runs_unquantised_is_told_of_once(release: str) -> None:
    sage._tell_once.cache_clear()
    q = drawn(1, 100, 2, 128)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            sage.dense(q, q, q, None, meta=None, options=(), **CALL)
    texts = [str(one.message) for one in told if one.category is PolyattnWarning]
    assert len(texts) == (1 if release == "1.0.6" else 0)
    assert all("multiples of 64" in text for text in texts)


@pytest.mark.filterwarnings(UNQUANTISED)
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 127, 191])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_fill_no_whole_tile_are_all_that_counts(release: str, width: int, keys: int, causal: bool) -> None:
    q, k, v = drawn(2, 150, 4, width), drawn(2, keys, 2, width) + 2, drawn(2, keys, 2, width) + 0.5
    out, _ = sage.dense(q, k, v, None, meta=None, options=(), **CALL | {"causal": causal})
    want = reference_attention(q.double(), k.double(), v.double(), causal=causal, scale=0.125)
    assert (out.double() - want).norm() / want.norm() < 0.05


@pytest.mark.filterwarnings(UNQUANTISED)
def test_the_widest_heads_are_computed_exactly_where_keys_are_few_and_fill_no_tile(release: str) -> None:
    for keys, exactly in ((100, True), (128, False), (191, False)):
        q, k, v = drawn(1, 70, 2, 128), drawn(1, keys, 2, 128), drawn(1, keys, 2, 128)
        out, _ = sage.dense(q, k, v, None, meta=None, options=(), **CALL)
        want = reference_attention(q.double(), k.double(), v.double(), scale=0.125)
        error = (out.double() - want).norm() / want.norm()
        assert (error < 1e-3) == (exactly and release == "1.0.6")


def test_the_callers_tensors_are_left_alone(release: str) -> None:
    q, k, v = drawn(1, 8, 2, 64), drawn(1, 8, 2, 64) + 3, drawn(1, 8, 2, 64)
    before = [tensor.clone() for tensor in (q, k, v)]
    sage.dense(q, k, v, None, meta=None, options=(), **CALL)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip((q, k, v), before, strict=True))


def test_a_large_mean_of_k_does_not_coarsen_its_int8(release: str) -> None:
    q, k, v = drawn(1, 64, 2, 64), drawn(1, 64, 2, 64) + 30, drawn(1, 64, 2, 64)
    out, _ = sage.dense(q, k, v, None, meta=None, options=(), **CALL)
    near(out, reference_attention(q.double(), k.double(), v.double()))


def test_documents_do_not_feel_each_other_and_one_without_keys_is_zero(release: str) -> None:
    lengths_q, lengths_k = [3, 2, 4], [5, 0, 6]
    q, k, v = drawn(11, 2, 64), drawn(11, 2, 64), drawn(11, 2, 64)
    k[:5] = float("nan")
    structure = Packed.from_lengths(lengths_q, lengths_k)
    meta = structure.bind(torch.device("cpu"), (11, 2, 64), (11, 2, 64))
    out, _ = sage.packed(q, k, v, None, meta=meta, options=(), **CALL)
    assert out[3:5].eq(0).all()
    assert out[9:].eq(0).all()
    near(out[5:9], reference_attention(*(t.double()[None] for t in (q[5:9], k[5:], v[5:])))[0])


def test_the_second_release_has_an_lse(release: str) -> None:
    q, k = drawn(1, 6, 2, 64), drawn(1, 9, 2, 64)
    if release == "1.0.6":
        assert isinstance(decision(release, quant="int8", lse=True), Rejected)
        return
    assert isinstance(decision(release, quant="int8", lse=True), Accepted)
    _, lse = sage.dense(q, k, k, None, meta=None, options=(), **CALL | {"causal": True, "need_lse": True})
    want = reference_attention(q.double(), k.double(), k.double(), causal=True, return_lse=True)[1]
    torch.testing.assert_close(lse.double(), want, atol=0.05, rtol=0)


def test_it_runs_only_where_int8_is_asked_for(release: str) -> None:
    assert isinstance(decision(release, quant="int8"), Accepted)
    refused = decision(release)
    assert isinstance(refused, Rejected)
    assert "quant='int8'" in "; ".join(refused.reasons)
    assert isinstance(decision(release, quant="fp8"), Rejected)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("head_dim 160 not in (64, 96, 128)", {"head_dim": 160}),
        ("gradients", {"grad": True}),
        ("window", {"window": (1, 1)}),
        ("softcap", {"softcap": 1.0}),
        (
            "boundaries are on the device",
            {"kind": "packed", "structure_facts": StructureFacts(host=False, documents=2)},
        ),
        (
            "bake their lengths",
            {"kind": "packed", "structure_facts": StructureFacts(documents=2, capacity=True), "capturing": True},
        ),
    ],
)
def test_it_refuses_with_the_reason(release: str, words: str, asked: dict[str, Any]) -> None:
    refused = decision(release, quant="int8", **asked)
    assert isinstance(refused, Rejected)
    assert words in "; ".join(refused.reasons)


@pytest.mark.parametrize(
    ("head_dim", "keys", "causal", "accepted"),
    [
        (128, 100, False, False), (128, 1000, False, False), (128, 4096, False, True), (128, 32760, False, True),
        (128, 100, True, True), (64, 100, False, True), (96, 100, False, True),
    ],
)  # fmt: skip
def test_the_first_release_refuses_few_keys_that_fill_no_tile_of_its_widest_kernel(
    release: str, head_dim: int, keys: int, causal: bool, accepted: bool
) -> None:
    found = decision(release, quant="int8", head_dim=head_dim, length=keys, causal=causal)
    assert isinstance(found, Accepted) == (accepted or release != "1.0.6")
    if isinstance(found, Rejected):
        assert f"bring the keys to a multiple of 64, install {sage.PACKAGE} 2.x" in "; ".join(found.reasons)


def test_the_first_release_refuses_what_32_bits_do_not_count(release: str) -> None:
    found = decision(release, quant="int8", length=2**25)
    assert isinstance(found, Accepted) == (release != "1.0.6")


def test_architectures_and_dtypes_are_the_releases_own(release: str) -> None:
    second = release.startswith("2")
    assert isinstance(decision(release, quant="int8", arch="sm_100"), Rejected if second else Accepted)
    assert isinstance(decision(release, quant="int8", dtype="float32"), Rejected if second else Accepted)
