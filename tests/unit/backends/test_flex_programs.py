"""flex: how many programs are compiled, and when they begin again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from polyattn import Mask, Packed, reference_attention
from polyattn.backends import flex_programs
from polyattn.backends import flex_slots as flex
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
