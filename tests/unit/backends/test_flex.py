"""flex: its blocks, its programs and their number, and what it makes of documents, by torch's own parts on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from polyattn import KeyPadding, Mask, Packed, Spans, reference_attention
from polyattn.backends import flex_blocks, flex_programs
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
    visibility,
)
from tests.emulators.cuda import flex_hop

CPU = torch.device("cpu")
CALL: dict[str, Any] = {"scale": 0.125, "softcap": 0.0, "need_lse": True, "options": ()}


@pytest.fixture(autouse=True)
def fresh_programs() -> Iterator[None]:
    flex_programs._program.cache_clear()
    yield
    flex_programs._program.cache_clear()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "flex_attention", flex_hop.flex_attention)
    monkeypatch.setattr(flex_programs, "compiled", lambda program: program)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend(slot: Any, q: torch.Tensor, k: torch.Tensor, structure: Any = None, **call: Any) -> Any:
    meta = None if structure is None else structure.bind(q.device, tuple(q.shape), tuple(k.shape))
    return slot(q, k, k, None, meta=meta, **{"causal": False, "window": None, **CALL, **call})


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=0)


def pairs(blocks: flex_blocks.Blocks, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    return flex_hop._visible(
        blocks.mask(queries, keys),
        (batch, heads, queries, keys),
        b,
        h,
        torch.arange(queries).view(-1, 1),
        torch.arange(keys),
    )


SEEN = {
    "causal": lambda: visibility.of_positions(300, 400, True, None, CPU),
    "causal_fewer_keys": lambda: visibility.of_positions(400, 130, True, None, CPU),
    "window": lambda: visibility.of_positions(512, 512, False, (70, 3), CPU),
    "whole_blocks": lambda: visibility.of_positions(256, 384, False, (None, None), CPU),
    "packed": lambda: visibility.of_packed(
        Packed.from_lengths([130, 0, 60, 200], [128, 5, 0, 190]).bind(CPU, (400, 1, 64), (330, 1, 64)),
        400, 330, False, None,
    ),
    "holes": lambda: visibility.of_key_padding(
        KeyPadding.from_ranges([[(3, 140), (260, 300)], []], 300).bind(CPU, (2, 300, 1, 64), (2, 300, 1, 64)),
        300, 300, True, None,
    ),
    "spans": lambda: visibility.of_spans(
        Spans([[(10, 300)], [(130, 150), (200, 390)]]).bind(CPU, (2, 390, 1, 64), (2, 390, 1, 64)), 390, 390
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_blocks_let_through_what_is_visible_and_nothing_else(name: str) -> None:
    seen = SEEN[name]()
    batch = max(seen.first.shape[0], 1 if seen.keep is None else seen.keep.shape[0])
    queries = seen.first.shape[1] if seen.asked is None else seen.asked.shape[1]
    queries = {"whole_blocks": 256}.get(name, queries)
    blocks = flex_blocks.of_visibility(seen, batch, queries)
    want = seen.mask.expand(batch, 1, queries, seen.keys)
    assert torch.equal(pairs(blocks, batch, 1, queries, seen.keys), want)


def test_blocks_that_are_visible_whole_are_told_apart() -> None:
    blocks = flex_blocks.of_visibility(visibility.of_positions(512, 512, True, None, CPU), 1, 512).mask(512, 512)
    assert blocks.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(2, 1, 1, 300), (1, 3, 200, 300), (2, 3, 200, 300), (1, 1, 1, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_a_mask_broadcast_as_it_does(shape: tuple[int, ...], causal: bool) -> None:
    keep = drawn(*shape) > 0.3
    keep[..., 128:256] = True
    seen = visibility.of_positions(200, shape[3], True, None, CPU) if causal else None
    blocks = flex_blocks.of_mask(keep, seen, (2, 3, 200, shape[3]))
    want = keep.expand(2, 3, 200, shape[3])
    assert torch.equal(pairs(blocks, 2, 3, 200, shape[3]), want if seen is None else want & seen.mask)
    assert blocks.mask(200, shape[3]).kv_indices.shape[:2] == (2 if causal else shape[0], shape[1])


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this torch is built for CUDA and finds no driver, which even fake CUDA tensors ask for",
)
def test_blocks_are_made_without_a_host_read() -> None:
    with FakeTensorMode():
        device = torch.device("cuda", 0)
        cu, keep = (
            torch.empty(4, dtype=torch.int32, device=device),
            torch.empty(2, 300, dtype=torch.bool, device=device),
        )
        packed = Packed.from_cu_seqlens(cu, max_q=200).bind(device, (500, 2, 64), (500, 2, 64))
        padded = KeyPadding.from_mask(keep).bind(device, (2, 300, 2, 64), (2, 300, 2, 64))
        flex_blocks.of_visibility(visibility.of_packed(packed, 500, 500, True, None), 1, 500)
        flex_blocks.of_visibility(visibility.of_key_padding(padded, 300, 300, True, (3, 0)), 2, 300)
        blocks = flex_blocks.of_mask(keep.unsqueeze(1).unsqueeze(1), None, (2, 2, 300, 300))
    assert all(tensor.device == device for tensor in (*blocks.facts, *blocks.tables))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts what torch compiles; its own flex attention runs, with gradients, on the CPU."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex_programs, "compiled", partial(torch.compile, fullgraph=True, backend=counter))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    return counter


@pytest.mark.parametrize("grad", [False, True])
def test_one_program_serves_all_lengths_and_strides(compiles: CompileCounterWithBackend, grad: bool) -> None:
    for lengths in ((130, 60), (200, 30), (300, 250), (7, 1), (400, 10, 20), (1,) * 3):
        q, k = drawn(sum(lengths), 4, 32), drawn(sum(lengths), 2, 64)[..., ::2]
        structure = Packed.from_lengths(list(lengths))
        out, _ = attend(flex.packed, q.requires_grad_(grad), k, structure)
        want = reference_attention(q, k, k, structure=structure, scale=0.125)
        close(out, want, atol=1e-4)
        if grad:
            found, right = (torch.autograd.grad(answer.sum(), q)[0] for answer in (out, want))
            close(found, right, atol=1e-4)
    assert compiles.frame_count == 1


def test_one_program_serves_one_query_and_many(compiles: CompileCounterWithBackend) -> None:
    for queries, keys in ((9, 9), (1, 9), (300, 200), (1, 500)):
        q, k = drawn(2, queries, 2, 32), drawn(2, keys, 2, 32)
        for call in ({"causal": True}, {"window": (2, 1)}):
            out, lse = attend(flex.dense, q, k, **call)
            want, want_lse = reference_attention(q, k, k, scale=0.125, return_lse=True, **call)
            close(out, want)
            close(lse, want_lse)
    assert compiles.frame_count == 1


def test_one_program_serves_all_scales_but_the_common_one(compiles: CompileCounterWithBackend) -> None:
    q = drawn(2, 9, 2, 64)
    for width, scale in ((64, 0.3), (64, 0.0), (40, 40**-0.5), (50, -0.2)):
        rows = q[..., :width]
        out, _ = attend(flex.dense, rows, rows, scale=scale)
        close(out, reference_attention(rows, rows, rows, scale=scale))
    attend(flex.dense, q, q, scale=0.125)
    assert compiles.frame_count == 2


def test_a_softcap_is_no_program_of_its_own(compiles: CompileCounterWithBackend) -> None:
    q = drawn(2, 9, 2, 64)
    for softcap, scale in ((1.5, 0.125), (20.0, 0.125), (3.0, 0.4)):
        out, _ = attend(flex.dense, q, q, softcap=softcap, scale=scale)
        close(out, reference_attention(q, q, q, scale=scale, softcap=softcap))
    assert compiles.frame_count == 1


@pytest.mark.parametrize("rows", [(1, 1, 1, 300), (2, 3, 1, 300), (2, 1, 200, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_takes_the_blocks_of_a_mask(
    compiles: CompileCounterWithBackend, rows: tuple[int, ...], causal: bool
) -> None:
    structure = Mask(drawn(*rows) > 0.3)
    for queries in (200, 1) if rows[2] == 1 else (200,):
        q, k = drawn(2, queries, 3, 32), drawn(2, 300, 3, 32)
        out, _ = attend(flex.mask, q, k, structure, causal=causal)
        close(out, reference_attention(q, k, k, structure=structure, causal=causal, scale=0.125))
    assert compiles.frame_count == 1


def test_a_program_is_compiled_below_an_operator_too(compiles: CompileCounterWithBackend) -> None:
    @torch.library.custom_op("test_flex::attend", mutates_args=())
    def operator(q: torch.Tensor) -> torch.Tensor:
        return attend(flex.dense, q, q, causal=True)[0].clone()

    @operator.register_fake
    def _(q: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(q)

    q = drawn(2, 9, 2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(lambda q: operator(q) * 2, fullgraph=True, backend="aot_eager")(q)
    close(out / 2, reference_attention(q, q, q, causal=True, scale=0.125))
    assert compiles.frame_count == 1


def test_programs_begin_again_where_torch_has_compiled_too_many(
    monkeypatch: pytest.MonkeyPatch, emulated: None
) -> None:
    class RecompileLimitHit(RuntimeError):
        pass

    tried = []

    def first_fails(program: Any) -> Any:
        tried.append(program)
        if len(tried) > 1:
            return program

        def fails(*_: Any) -> None:
            raise RecompileLimitHit

        return fails

    monkeypatch.setattr(flex_programs, "compiled", first_fails)
    q = drawn(1, 5, 2, 32)
    out, _ = attend(flex.dense, q, q)
    close(out, reference_attention(q, q, q, scale=0.125))
    assert len(tried) == 2


def test_an_error_of_another_kind_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(flex_programs, "compiled", lambda _: fails)
    q = drawn(1, 5, 2, 32)
    with pytest.raises(RuntimeError, match="out of memory"):
        attend(flex.dense, q, q)


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
