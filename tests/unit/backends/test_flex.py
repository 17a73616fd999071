"""flex: what its slots make of documents, and what it takes and refuses, by torch's own parts on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from polyattn import KeyPadding, Mask, Packed, reference_attention
from polyattn.backends import flex_programs
from polyattn.backends import flex_slots as flex
from polyattn.vendor import (
    Accepted,
    Machine,
    Rejected,
    Request,
    StructureFacts,
    TensorFacts,
    flex_backend,
    resolve,
)
from tests.emulators.cuda import flex_hop
from tests.unit.backends.flex_calls import attend, close, drawn


@pytest.fixture(autouse=True)
def fresh_programs() -> Iterator[None]:
    flex_programs._program.cache_clear()
    yield
    flex_programs._program.cache_clear()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "flex_attention", flex_hop.flex_attention)
    monkeypatch.setattr(flex_programs, "compiled", lambda program: program)


@pytest.mark.usefixtures("emulated")
@pytest.mark.emulated
class TestSlots:
    def test_layers_share_one_block_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        run = flex_programs.run
        monkeypatch.setattr(flex, "run", lambda *a, **k: (given.append(a[3]), run(*a, **k))[1])
        q, structure = drawn(2, 9, 2, 32), KeyPadding.from_lengths([9, 4], 9)
        for _ in range(2):
            attend(flex.key_padding, q, q, structure)
            attend(flex.dense, q, q, causal=True)
        assert given[0] is given[2]
        assert given[1] is given[3]

    def test_boundaries_on_a_device_are_read_anew_at_each_call(self) -> None:
        q, structure = drawn(9, 2, 32), Packed.from_lengths([4, 3], capacity=(2, 9))
        for lengths in ([4, 3], [2, 7]):
            structure.update_(lengths)
            out, _ = attend(flex.packed, q, q, structure)
            want = reference_attention(q, q, q, structure=Packed.from_lengths(lengths), scale=0.125)
            close(out, want)

    def test_a_nan_in_a_document_stays_in_it_and_is_not_hidden_there(self) -> None:
        q, k = drawn(9, 4, 32), drawn(9, 2, 32)
        clean = k.clone()
        k[1, 1] = float("nan")
        structure = Packed.from_lengths([3, 4], capacity=(2, 9))
        out, lse = attend(flex.packed, q, k, structure)
        want = reference_attention(q, clean, clean, structure=structure, scale=0.125)
        assert out[:3, 2:].isnan().all()  # the query heads of the KV head that holds it
        assert lse[2:, :3].isnan().all()
        close(out[3:], want[3:])
        close(out[:3, :2], want[:3, :2])

    @pytest.mark.parametrize("strange", [float("nan"), float("inf")])
    def test_gradients_of_a_document_feel_nothing_of_strange_queries_in_another(self, strange: float) -> None:
        structure = Packed.from_lengths([3, 4, 1], [3, 4, 0])
        q, k = drawn(9, 4, 32), drawn(7, 2, 32)
        q[1, 3] = strange
        q[7] = strange  # a document without keys
        found, right = ([tensor.clone().requires_grad_() for tensor in (q, k)] for _ in range(2))
        out, lse = attend(flex.packed, *found, structure)
        assert out[1, 3].isnan().all()
        assert lse[3, 1].isnan()
        assert out[7:].eq(0).all()
        assert lse[:, 7:].isneginf().all()
        clean = Packed.from_lengths([4], [4])
        want = reference_attention(right[0][3:7], right[1][3:], right[1][3:], structure=clean, scale=0.125)
        close(out[3:7], want)
        down = drawn(9, 4, 32)
        got = torch.autograd.grad(out, found, down)
        for mine, theirs in zip(got, torch.autograd.grad(want, right, down[3:7].to(want.dtype)), strict=True):
            close(mine[3:7], theirs[3:7])

    def test_a_block_mask_is_not_made_inside_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, warm, cold = drawn(1, 6, 2, 32), Mask(torch.ones(6).bool()), Mask(torch.ones(6).bool())
        attend(flex.mask, q, q, warm)
        monkeypatch.setattr(flex, "is_capturing", lambda device: True)
        attend(flex.mask, q, q, warm)
        with pytest.raises(RuntimeError, match=r"pa\.warmup"):
            attend(flex.mask, q, q, cold)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("head_dim 8 not in", {"head_dim": 8}),
        ("dtype float64", {"dtype": "float64"}),
        ("'paged'", {"structure_kind": "paged"}),
        ("'bias'", {"structure_kind": "bias"}),
        ("lengths on the host", {
            "structure_kind": "packed", "structure_facts": StructureFacts(host=False, documents=2, spans=True)}),
        ("triton is not installed", {"versions": {}}),
        ("not on Sundays", {"check": lambda request, machine: ("not on Sundays",)}),
    ],
)  # fmt: skip
def test_it_refuses_with_the_reason(words: str, change: dict[str, Any]) -> None:
    refused = decision(**change)
    assert isinstance(refused, Rejected)
    assert words in "; ".join(refused.reasons)


@pytest.mark.parametrize("kind", ["dense", "prefix_kv", "key_padding", "mask", "packed", "spans"])
def test_it_takes_each_of_its_structures(kind: str) -> None:
    facts = StructureFacts(host=kind == "spans", documents=2, spans=kind == "spans")
    assert isinstance(decision(structure_kind=kind, structure_facts=facts, grad=True, lse=True), Accepted)


def decision(
    head_dim: int = 64,
    dtype: str = "bfloat16",
    versions: dict[str, str] | None = None,
    check: Any = lambda request, machine: (),
    **asked: Any,
) -> Any:
    tensor = TensorFacts.contiguous((1, 8, 2, head_dim), dtype)
    request = Request(tensor, tensor, tensor, device="gpu:0", **asked)
    machine = Machine("toy", "gpu", versions={"triton": "3.6.0"} if versions is None else versions)
    return resolve(request, machine, [flex_backend(check=check)])[0]
