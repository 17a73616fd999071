"""ipex over a stand-in of its function: the scale it cannot drop, causal where both corners are one, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import Packed
from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_xpu import ipex

VERSIONS = {"intel-extension-for-pytorch": "2.8.10+xpu", "torch": "2.8.0+xpu"}
XPU = Machine("xpu", "xpu", versions=VERSIONS)
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": False}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the package's function is called with from now on; it fills its buffer with ones."""
    calls: list[dict[str, Any]] = []

    def stand_in(**given: Any) -> torch.Tensor:
        calls.append(given)
        return given["out"].fill_(1.0)

    monkeypatch.setattr(ipex, "_operator", lambda: stand_in)
    return calls


def request(kind: str = "dense", *, keys: int = 9, dim: int = 64, dtype: str = "bfloat16", **facts: Any) -> Request:
    lead = () if kind == "packed" else (2,)
    q = TensorFacts.contiguous((*lead, 9, 4, dim), dtype)
    k = TensorFacts.contiguous((*lead, keys, 4, dim), dtype)
    return Request(q, k, k, device="xpu:0", structure_kind=kind, **{"scale": dim**-0.5} | facts)


def reasons(made: Request, machine: Machine = XPU) -> str:
    decision = resolve(made, machine, [ipex.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


@pytest.mark.parametrize(("scale", "times"), [(0.125, 1.0), (0.25, 2.0), (0.03125, 0.25), (-0.125, -1.0), (0.0, 0.0)])
def test_it_is_told_its_own_scale_and_q_brings_the_rest(
    asked: list[dict[str, Any]], scale: float, times: float
) -> None:
    q = torch.randn(1, 4, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, lse = ipex.dense(q, q, q, None, meta=None, options=(), **CALL | {"scale": scale})
    (given,) = asked
    assert given["softmax_scale"] == 0.125
    assert torch.equal(given["query"], (q * times).flatten(0, 1))
    assert given["seqlen_q"].tolist() == given["seqlen_k"].tolist() == [0, 4]
    assert (given["pdropout"], given["zero_tensors"], given["return_softmax"]) == (0.0, False, False)
    assert out.eq(1).all()
    assert lse is None


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (5, 2), (3, 0)])
def test_dense_causal_calls_are_made_square(asked: list[dict[str, Any]], queries: int, keys: int) -> None:
    q, k = torch.ones(1, queries, 2, 64), torch.ones(1, keys, 2, 64)
    out, _ = ipex.dense(q, k, k, None, meta=None, options=(), **CALL | {"causal": True})
    assert all(given["max_seqlen_q"] == given["max_seqlen_k"] == keys for given in asked)
    assert out[0, :, 0, 0].tolist() == [0.0] * (queries - keys) + [1.0] * min(queries, keys)


def test_rows_past_the_documents_never_reach_it_and_documents_without_keys_are_zero(
    asked: list[dict[str, Any]],
) -> None:
    q = torch.ones(7, 2, 64)
    meta = Packed.from_lengths([2, 3], [0, 4]).bind(torch.device("cpu"), (7, 2, 64), (7, 2, 64))
    out, _ = ipex.packed(q, q, q, None, meta=meta, options=(), **CALL)
    assert asked[0]["query"].shape[0] == 5
    assert asked[0]["key"].shape[0] == 4
    assert out[:, 0, 0].tolist() == [0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("dim", [64, 128])
def test_scales_that_a_power_of_two_away_from_its_own_are_taken(dim: int) -> None:
    assert reasons(request(dim=dim)) == ""
    assert reasons(request(dim=dim, scale=dim**-0.5 * 4)) == ""
    assert "scale 0.3 is not honoured" in reasons(request(dim=dim, scale=0.3))
    told = reasons(request(dim=dim, scale=dim**-0.5 * 4, dtype="float16"))
    assert "is not honoured by every build of it" in told, "not the installed one alone"
    assert "power of two" not in told


def test_causal_is_taken_where_both_corners_are_one() -> None:
    assert reasons(request(causal=True)) == ""
    assert reasons(request(causal=True, keys=12)) == "", "the slot makes it square"
    for same, words in ((True, ""), (False, "top left")):
        facts = StructureFacts(documents=2, same_lengths=same)
        assert words in reasons(request("packed", causal=True, structure_facts=facts))
        assert bool(reasons(request("packed", causal=True, structure_facts=facts))) == bool(words)


@pytest.mark.parametrize(("facts", "words"), [
    ({"lse": True}, "LSE"),
    ({"window": (2, 0)}, "window"),
    ({"softcap": 5.0}, "softcap"),
    ({"grad": True}, "gradients"),
    ({"dtype": "float32"}, "float32"),
    ({"kind": "packed", "structure_facts": StructureFacts(host=False, documents=2)}, "only the device knows"),
    ({"kind": "packed", "structure_facts": StructureFacts(documents=2, capacity=True)}, "only the device knows"),
])  # fmt: skip
def test_what_it_cannot_do_is_told(facts: dict[str, Any], words: str) -> None:
    assert words in reasons(request(facts.pop("kind", "dense"), **facts))


@pytest.mark.parametrize(("versions", "words"), [
    ({}, "retired"),
    (VERSIONS | {"intel-extension-for-pytorch": "2.8.0"}, "CPU build"),
    (VERSIONS | {"torch": "2.11.0+xpu"}, "beside torch 2.8 only, and this is 2.11.0+xpu"),
    (VERSIONS | {"intel-extension-for-pytorch": "2.7.10+xpu"}, "older than 2.8"),
])  # fmt: skip
def test_builds_that_cannot_run_are_told(versions: dict[str, str], words: str) -> None:
    assert words in reasons(request(), Machine("xpu", "xpu", versions=versions))
