"""The answer where there is nothing to attend to."""

import pytest
import torch

from polyattn.backends.empty import empty_attention


@pytest.mark.parametrize(("q", "k", "v", "out", "lse"), [
    ((0, 4, 2, 16), (0, 4, 2, 16), (0, 4, 2, 16), (0, 4, 2, 16), (0, 2, 4)),
    ((2, 0, 2, 16), (2, 3, 2, 16), (2, 3, 2, 8), (2, 0, 2, 8), (2, 2, 0)),
    ((1, 3, 2, 16), (1, 0, 1, 16), (1, 0, 1, 8), (1, 3, 2, 8), (1, 2, 3)),
    ((0, 2, 16), (0, 2, 16), (0, 2, 16), (0, 2, 16), (2, 0)),
    ((5, 2, 16), (0, 1, 16), (0, 1, 4), (5, 2, 4), (2, 5)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_shapes(q, k, v, out, lse, dtype):
    """fault_cases row 16."""
    tensors = [torch.full(shape, float("nan"), dtype=dtype, requires_grad=True) for shape in (q, k, v)]
    answer, row_lse = empty_attention(*tensors, True)
    assert (answer.shape, answer.dtype) == (out, dtype)
    assert answer.eq(0).all()
    assert (row_lse.shape, row_lse.dtype) == (lse, torch.float32)
    assert row_lse.isneginf().all()
    assert empty_attention(*tensors, False)[1] is None
    for tensor, gradient in zip(tensors, torch.autograd.grad(answer.sum(), tensors), strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.eq(0).all()


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    q = torch.zeros(1, 3, 2, 16, requires_grad=True)
    with torch.no_grad():
        assert empty_attention(q, q, q, False)[0].grad_fn is None
