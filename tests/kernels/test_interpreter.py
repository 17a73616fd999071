"""What the tests of this folder rely on: who runs them, and that the interpreter is asked for no bf16 product."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

from polyattn.kernels.row_kernels import pack_kernel


@triton.jit
def _product(a, b, c):
    place = tl.arange(0, 16)
    square = place[:, None] * 16 + place[None, :]
    tl.store(c + square, tl.dot(tl.load(a + square), tl.load(b + square)))


def test_kernels_are_interpreted_where_there_is_no_gpu_and_compiled_where_there_is(device: str) -> None:
    assert isinstance(pack_kernel, InterpretedFunction) == (device == "cpu")


def test_dtypes_leave_bf16_to_a_gpu(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    assert (torch.bfloat16 in dtypes) == (device != "cpu")


def test_a_bf16_product_is_refused_by_the_interpreter_and_right_on_a_gpu(device: str) -> None:
    """The interpreter multiplies bf16 wrongly, without an error of its own."""
    a = torch.eye(16, device=device, dtype=torch.bfloat16)
    c = torch.empty(16, 16, device=device)
    if device == "cpu":
        with pytest.raises(InterpreterError, match="bf16 products are wrong"):
            _product[(1,)](a, a, c)
    else:
        _product[(1,)](a, a, c)
        assert torch.equal(c, a.float())


def test_products_are_right_in_the_dtypes_that_tests_use(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        a, b = (torch.randint(-8, 9, (16, 16), generator=generator).to(device, dtype) for _ in range(2))
        c = torch.empty(16, 16, device=device)
        _product[(1,)](a, b, c)
        assert torch.equal(c.double(), a.double() @ b.double()), dtype
