"""mudnn over a stand-in of torch_musa's operator: what it is asked, what is made of its answers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import Packed
from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_musa import mudnn

S5000 = Machine("musa", "musa", arch="mp_31", versions={"torch_musa": "2.7.1"})
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": False}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the operator is called with from now on; it answers 7 everywhere."""
    calls: list[dict[str, Any]] = []

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
        calls.append(given | {"q": q, "k": k, "v": v})
        return torch.full_like(q, 7.0), torch.zeros(1, q.shape[1], q.shape[0])

    monkeypatch.setattr(mudnn, "_OPERATOR", stand_in)
    return calls


def request(kind: str = "packed", *, heads: int = 4, dim: int = 64, **facts: Any) -> Request:
    lead = (9,) if kind == "packed" else (2, 9)
    q = TensorFacts.contiguous((*lead, 4, dim), "float16")
    k = TensorFacts.contiguous((*lead, heads, dim), "float16")
    return Request(q, k, k, device="musa:0", structure_kind=kind, scale=0.125, **facts)


def reasons(made: Request, machine: Machine = S5000) -> str:
    decision = resolve(made, machine, [mudnn.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


def test_documents_go_by_their_boundaries_with_the_scale_and_no_window(asked: list[dict[str, Any]]) -> None:
    q = torch.ones(6, 2, 64)
    meta = Packed.from_lengths([2, 3], [0, 3]).bind(torch.device("cpu"), (6, 2, 64), (6, 2, 64))
    out, lse = mudnn.packed(q, q, q, None, meta=meta, options=(), **CALL | {"scale": 0.3})
    (given,) = asked
    assert given["cum_seq_q"].tolist() == [0, 2, 5]
    assert given["cum_seq_k"].tolist() == [0, 0, 3]
    assert (given["max_q"], given["max_k"], given["scale"], given["is_causal"]) == (3, 3, 0.3, False)
    assert (given["dropout_p"], given["return_debug_mask"]) == (0.0, False)
    assert not {"window_size_left", "window_size_right", "alibi_slopes", "seqused_k"} & set(given), "it takes none"
    assert out[:, 0, 0].tolist() == [0, 0, 7, 7, 7, 0]
    assert lse is None


def test_the_operator_of_this_torch_takes_these_names() -> None:
    names = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    assert {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask", "scale"} <= names


def test_causal_is_taken_where_queries_and_keys_are_the_same_rows() -> None:
    assert reasons(request(structure_facts=StructureFacts(documents=2), causal=True)) == ""
    told = reasons(request(structure_facts=StructureFacts(documents=2, same_lengths=False), causal=True))
    assert "not documented" in told
    assert reasons(request(structure_facts=StructureFacts(documents=2, same_lengths=False))) == ""
    padded = StructureFacts(prefix=True, queries="same")
    assert reasons(request("key_padding", structure_facts=padded, causal=True)) == ""


@pytest.mark.parametrize(("facts", "words"), [
    ({"lse": True}, "LSE"),
    ({"window": (2, 0)}, "window"),
    ({"softcap": 5.0}, "softcap"),
    ({"grad": True}, "gradients"),
    ({"heads": 2}, "GQA"),
    ({"dim": 192}, "head_dim 192"),
    ({"kind": "dense"}, "structure 'dense'"),
])  # fmt: skip
def test_what_it_cannot_do_is_told(facts: dict[str, Any], words: str) -> None:
    assert words in reasons(request(facts.pop("kind", "packed"), **facts))


@pytest.mark.parametrize(("machine", "words"), [
    (Machine("musa", "musa", arch="mp_21", versions=S5000.versions), "mp_21 is older than mp_22"),
    (Machine("musa", "musa"), "torch_musa is not installed"),
    (Machine("musa", "musa", versions={"torch_musa": "2.5.0"}), "older than 2.7"),
])  # fmt: skip
def test_machines_that_cannot_run_it_are_told(machine: Machine, words: str) -> None:
    assert words in reasons(request(), machine)


@pytest.mark.parametrize("arch", ["", "mp_", "mp_3", "mp_²", "mp_2x", "MP_31"])
def test_an_architecture_that_is_no_such_number_is_given_the_benefit_of_doubt(arch: str) -> None:
    assert reasons(request(), Machine("musa", "musa", arch=arch, versions=S5000.versions)) == ""
