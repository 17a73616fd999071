"""Key padding over a varlen kernel: what is packed, what stays in place, and equal answers either way."""

from __future__ import annotations

import pytest
import torch

from polyattn import KeyPadding, reference_attention
from polyattn.backends import varlen_padding
from polyattn.backends.row_ops import TORCH_ROWS

CALL = {"causal": False, "scale": 0.3, "window": None, "softcap": 0.0, "need_lse": True, "options": ()}


class Kernel:
    """Documents one by one through the reference; remembers how many rows it got."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def __call__(self, q, k, v, out, *, cu_q, cu_k, max_q, max_k, causal, scale, window, softcap, need_lse):
        self.rows.append((q.shape[0], k.shape[0]))
        result = q.new_full((*q.shape[:-1], v.shape[-1]), float("nan")) if out is None else out
        lse = q.new_full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)
        for document in range(cu_q.shape[0] - 1):
            rows, keys = (slice(int(cu[document]), int(cu[document + 1])) for cu in (cu_q, cu_k))
            part, part_lse = reference_attention(
                q[None, rows], k[None, keys], v[None, keys], scale=scale, return_lse=True
            )
            result[rows], lse[:, rows] = part[0], part_lse[0].float()
        return result, lse


@pytest.mark.parametrize("queries", ["same", "all"])
@pytest.mark.parametrize("few", [0, 2, 3])
@pytest.mark.parametrize("given", [None, "contiguous", "permuted"])
def test_answers_are_the_references_wherever_the_queries_are(few, queries, given):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 7, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    keep = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0, 0]], dtype=torch.bool)  # 5 holes in 2 samples
    q[1, 0] = k[1, 0] = v[1, 0] = float("nan")
    if queries == "all":
        q[1, 0] = 1.0
    structure = KeyPadding.from_mask(keep, queries=queries)
    out = None if given is None else torch.full_like(q, 7.0)
    out = out.transpose(0, 1).contiguous().transpose(0, 1) if given == "permuted" else out
    kernel = Kernel()
    result, lse = varlen_padding.key_padding(
        kernel, TORCH_ROWS._replace(few=few), q, k, v, out, meta=structure.bind(q.device, q.shape, k.shape), **CALL
    )
    want, want_lse = reference_attention(q, k, v, structure=structure, scale=0.3, return_lse=True)
    torch.testing.assert_close(result, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float())
    assert out is None or result is out
    moved = queries == "same" and few < 3  # 2.5 padded rows a sample
    assert kernel.rows == [(9 if moved else 14, 9)]


def test_positions_and_gradients_need_the_packed_way():
    q = torch.randn(1, 6, 1, 8, dtype=torch.float64, requires_grad=True)
    structure = KeyPadding.from_lengths([5], 6)
    meta, kernel = structure.bind(q.device, q.shape, q.shape), Kernel()
    rows = TORCH_ROWS._replace(few=6)
    varlen_padding.key_padding(kernel, rows, q, q, q, None, meta=meta, **CALL)
    varlen_padding.key_padding(
        kernel, rows, q.detach(), q.detach(), q.detach(), None, meta=meta, **CALL | {"causal": True}
    )
    varlen_padding.key_padding(kernel, rows, q.detach(), q.detach(), q.detach(), None, meta=meta, **CALL)
    assert kernel.rows == [(5, 5), (5, 5), (6, 5)]
