"""mate over stand-ins of its functions: what they are asked, what is made of their answers, what is refused."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn import KeyPadding, Packed, Paged
from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_musa import MusaOptions, mate, mate_forward, mate_package, mate_pages

S5000 = Machine("musa", "musa", arch="mp_31", versions={"mate": "0.2.1", "flash_attn_3": "0.2.1"})
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": False}
Asked = list[dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What either function is called with from now on; they answer 7 everywhere, and LSE 0: nothing is known of rows
    that see no key."""
    calls: Asked = []

    def stand_in(**given: Any) -> Any:
        calls.append(given)
        q = given["q"]
        shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
        out, lse = torch.full_like(q, 7.0), torch.zeros(shape)
        return (out, lse) if given["return_softmax_lse"] else out

    monkeypatch.setattr(mate_forward, "operators", lambda: (stand_in, stand_in))
    monkeypatch.setattr(mate_pages, "operators", lambda: (stand_in, stand_in))
    return calls


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def meta_of(structure: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    return structure.bind(torch.device("cpu"), tuple(q.shape), tuple(k.shape))


def request(kind: str = "dense", *, dim: int = 64, **facts: Any) -> Request:
    lead = (9,) if kind == "packed" else (2, 9)
    q = TensorFacts.contiguous((*lead, 4, dim), "float16")
    k = TensorFacts.contiguous((8, 16, 4, dim), "float16") if kind == "paged" else q
    return Request(q, k, k, device="musa:0", structure_kind=kind, scale=0.125, **facts)


def reasons(made: Request, machine: Machine = S5000) -> str:
    decision = resolve(made, machine, [mate.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


# what is asked


def test_dense_is_called_as_it_is_by_name_with_the_scale(asked: Asked) -> None:
    q, k = drawn(2, 4, 3, 64), drawn(2, 6, 3, 64)
    out, lse = mate_forward.dense(q, k, k, None, meta=None, options=(), **CALL | {"scale": 0.3})
    (given,) = asked
    assert (given["softmax_scale"], given["causal"], given["window_size"]) == (0.3, False, (-1, -1))
    assert (given["softcap"], given["return_softmax_lse"]) == (0.0, False)
    assert given["q"].shape == q.shape
    assert "cu_seqlens_q" not in given
    assert out.eq(7).all()
    assert lse is None


@pytest.mark.parametrize(("causal", "window", "softcap", "said"), [
    (True, None, 0.0, (True, (-1, -1))),
    (False, (None, 0), 0.0, (True, (-1, -1))),  # what causal alone says is an assertion of the faster kernel else
    (True, (3, 0), 0.0, (True, (3, 0))),
    (False, (3, 1), 0.0, (False, (3, 1))),
    (False, (None, 2), 0.0, (False, (-1, 2))),
    (False, None, 5.0, (False, (12, -1))),  # the faster kernel drops a softcap
    (True, None, 5.0, (True, (12, -1))),
    (False, (3, 1), 5.0, (False, (3, 1))),
])  # fmt: skip
def test_masks_in_its_words(causal: bool, window: Any, softcap: float, said: Any) -> None:
    assert mate_forward.bounds(causal, window, softcap, 12) == said


@pytest.mark.parametrize(("scale", "sign"), [(-0.5, -1.0), (0.0, 0.0)])
def test_a_scale_of_zero_or_below_is_moved_into_q(asked: Asked, scale: float, sign: float) -> None:
    q = drawn(1, 4, 2, 64)
    mate_forward.dense(q, q, q, None, meta=None, options=(), **CALL | {"scale": scale})
    assert asked[0]["softmax_scale"] == (0.5 if scale else 1.0)
    assert torch.equal(asked[0]["q"], q * sign)


def test_documents_go_by_their_boundaries(asked: Asked) -> None:
    q = drawn(6, 2, 64)
    out = torch.zeros_like(q)
    meta = meta_of(Packed.from_lengths([2, 4]), q, q)
    result, lse = mate_forward.packed(q, q, q, out, meta=meta, options=(), **CALL | {"need_lse": True, "causal": True})
    (given,) = asked
    assert given["cu_seqlens_q"].tolist() == given["cu_seqlens_k"].tolist() == [0, 2, 6]
    assert (given["max_seqlen_q"], given["max_seqlen_k"], given["causal"]) == (4, 4, True)
    assert result is out
    assert out.eq(7).all()
    assert lse.shape == (2, 6)


# what is made of the answers


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (None, 0)), (False, (2, 1))])
def test_first_rows_that_see_no_key_are_zero(asked: Asked, causal: bool, window: Any) -> None:
    q, k = drawn(1, 6, 2, 64), drawn(1, 2, 2, 64)
    call = CALL | {"causal": causal, "window": window, "need_lse": True}
    out, lse = mate_forward.dense(q, k, k, None, meta=None, options=(), **call)
    blind = 3 if window == (2, 1) else 4
    assert out[:, :blind].eq(0).all()
    assert out[:, blind:].eq(7).all()
    assert lse[:, :, :blind].isneginf().all()
    assert lse[:, :, blind:].eq(0).all()


def test_documents_and_samples_without_keys_are_zero(asked: Asked) -> None:
    q = drawn(3, 2, 64)
    meta = meta_of(Packed.from_lengths([2, 1], [0, 3]), q, q)
    out, lse = mate_forward.packed(q, q, q, None, meta=meta, options=(), **CALL | {"need_lse": True})
    assert out[:, 0, 0].tolist() == [0, 0, 7]
    assert lse[0].tolist() == [float("-inf")] * 2 + [0]
    rows = drawn(2, 3, 2, 64)
    padded = meta_of(KeyPadding.from_lengths([3, 0], 3, queries="all"), rows, rows)
    out, _ = mate_forward.key_padding(rows, rows, rows, None, meta=padded, options=(), **CALL)
    assert out[:, 0, 0, 0].tolist() == [7, 0]


def test_keys_before_every_window_never_reach_it(asked: Asked) -> None:
    q, k = drawn(1, 2, 2, 64), drawn(1, 9, 2, 64)
    mate_forward.dense(q, k, k, None, meta=None, options=(), **CALL | {"window": (1, None)})
    assert asked[0]["k"].shape[1] == 3


# pages


def paged_call(lengths: list[int], options: tuple[object, ...] = (), **call: Any) -> torch.Tensor:
    pool = drawn(8, 32, 1, 64)
    q = drawn(len(lengths), 2, 2, 64)
    structure = Paged([[2, 0, -1], [5, 1, 3]][: len(lengths)], lengths)
    out, _ = mate_pages.paged(q, pool, pool, None, meta=meta_of(structure, q, pool), options=options, **CALL | call)
    return out


def test_rows_that_end_with_a_tile_are_read_where_they_are(asked: Asked) -> None:
    assert paged_call([64, 64], causal=True).eq(7).all()
    (given,) = asked
    assert given["seqused_k"].tolist() == [64, 64]
    assert given["page_table"].tolist() == [[2, 0, 0], [5, 1, 3]], "an entry that names no page names one"
    assert given["cu_seqlens_q"].tolist() == [0, 2, 4]
    assert given["k"].shape == (8, 32, 1, 64)
    assert "cu_seqlens_k" not in given


def test_rows_that_end_before_are_copied_unless_the_caller_vouches(asked: Asked) -> None:
    paged_call([20, 7])
    assert asked[0]["cu_seqlens_k"].tolist() == [0, 20, 27]
    paged_call([20, 7], (MusaOptions(finite_pages=True),))
    assert asked[1]["seqused_k"].tolist() == [20, 7]


@pytest.mark.parametrize("options", [(), (MusaOptions(finite_pages=True),)], ids=["copied", "in place"])
def test_a_row_without_keys_is_zero(asked: Asked, options: tuple[object, ...]) -> None:
    out = paged_call([0, 7], options)
    assert out[:, 0, 0, 0].tolist() == [0, 7]
    assert paged_call([0, 0], options).eq(0).all()


# what is refused


@pytest.mark.parametrize("kind", ["dense", "packed", "key_padding", "prefix_kv"])
def test_plain_requests_are_accepted_also_where_the_device_is_not_known(kind: str) -> None:
    facts = StructureFacts(documents=2, prefix=True, queries="same")
    for machine in (S5000, Machine("musa", "musa", versions=S5000.versions)):
        assert reasons(request(kind, structure_facts=facts), machine) == ""


def test_a_window_over_a_prefix_runs_as_the_slice_that_it_is() -> None:
    facts = StructureFacts(prefix=True, queries="same", common_prefix=5)
    answer = resolve(request("prefix_kv", window=(2, 2), structure_facts=facts), S5000, [mate.backend()])[0]
    assert isinstance(answer, Accepted)
    assert answer.slot.name == "prefix_kv"


@pytest.mark.parametrize(("facts", "words"), [
    ({"grad": True}, "gradients"),
    ({"deterministic": True}, "deterministic"),
    ({"dim": 520}, "head_dim 520"),
    ({"kind": "mask"}, "structure 'mask'"),
    ({"kind": "key_padding", "causal": True, "structure_facts": StructureFacts(prefix=False)}, "would move"),
    ({"kind": "paged", "structure_facts": StructureFacts(host=False, page_size=16)}, "block table on the device"),
    ({"kind": "paged", "structure_facts": StructureFacts(query_layout="padded", page_size=16)}, "padded queries"),
])  # fmt: skip
def test_what_it_cannot_do_is_told(facts: dict[str, Any], words: str) -> None:
    assert words in reasons(request(facts.pop("kind", "dense"), **facts))


@pytest.mark.parametrize(("machine", "words"), [
    (Machine("musa", "musa", arch="mp_22", versions=S5000.versions), "mp_31 alone, and this is mp_22"),
    (Machine("musa", "musa", arch="mp_31"), "package mate is not installed"),
    (Machine("musa", "musa", arch="mp_31", versions={"mate": "0.2.0"}), "package flash_attn_3 is not installed"),
])  # fmt: skip
def test_machines_that_cannot_run_it_are_told(machine: Machine, words: str) -> None:
    assert words in reasons(request(), machine)


def test_the_registrys_mate_is_told_from_moore_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = mate_package.unlike()
    assert "registry" in told
    monkeypatch.setattr(mate_package, "BROKEN", told)
    assert told not in reasons(request()), "of this process, not of a machine that is described"
    monkeypatch.setattr(mate, "is_here", lambda *_: True)
    assert told in reasons(request())
    (package / "mha_interface.py").write_text("")
    assert mate_package.unlike() == ""


def test_another_makers_module_of_that_name_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def nvidias(q, k, v, softmax_scale, causal, window_size, softcap, return_softmax_lse): ...  # type: ignore[no-untyped-def]

    module = types.SimpleNamespace(flash_attn_func=nvidias, flash_attn_varlen_func=nvidias)
    monkeypatch.setattr(mate_package.importlib, "import_module", lambda name: module)
    mate_package.operators.cache_clear()
    with pytest.raises(RuntimeError, match=r"cp_world_size.*flash_attn_3"):
        mate_package.operators()
    mate_package.operators.cache_clear()
