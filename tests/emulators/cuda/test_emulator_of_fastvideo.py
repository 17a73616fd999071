"""The emulated fastvideo_kernel fails where the real one is known to: each trap of its entry points, by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from math import log, sqrt

import pytest
import torch

from tests.emulators.cuda import fastvideo as emulator

pytestmark = pytest.mark.emulated

SIZES = torch.tensor([64, 40], dtype=torch.int32)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    emulator.install()
    yield
    emulator.uninstall()


def drawn(batch: int = 1, heads: int = 2, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(batch, heads, 128, width, generator=torch.Generator().manual_seed(batch + heads)).to(dtype)
    x[:, :, 104:] = 0.0
    return x


def everything(batch: int = 1, heads: int = 2) -> torch.Tensor:
    return torch.ones(batch, heads, 2, 2, dtype=torch.bool)


def dense(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [.., 104, D] and lse over the real rows."""
    rows = x[:, :, :104].float()
    scores = rows @ rows.transpose(2, 3) / sqrt(x.shape[-1])
    return scores.softmax(-1) @ rows, scores.logsumexp(-1)


def test_all_blocks_kept_are_dense_attention_and_the_lse_has_two_conventions() -> None:
    x = drawn()
    want, lse = dense(x)
    out, aux = emulator.block_sparse_attn(x, x, x, everything(), SIZES)
    torch.testing.assert_close(out[:, :, :104].float(), want, atol=2e-2, rtol=0)
    torch.testing.assert_close(aux[:, :, :104] * log(2.0), lse, atol=1e-3, rtol=0)
    emulator.install(compiled=True)
    _, aux = emulator.block_sparse_attn(x, x, x, everything(), SIZES)
    torch.testing.assert_close(aux[:, :, :104, 0] / -sqrt(64), lse, atol=1e-3, rtol=0)


def test_no_gate_is_a_gate_of_one() -> None:
    x = drawn()
    call = {"topk": 2, "block_size": (4, 4, 4)}
    bare = emulator.video_sparse_attn(x, x, x, SIZES, SIZES, **call)
    ones = emulator.video_sparse_attn(x, x, x, SIZES, SIZES, compress_attn_weight=torch.ones_like(x), **call)
    none = emulator.video_sparse_attn(x, x, x, SIZES, SIZES, compress_attn_weight=torch.zeros_like(x), **call)
    assert torch.equal(bare, ones)
    assert not torch.equal(bare, none)


def test_an_integer_is_the_edge_of_a_cube() -> None:
    x = drawn()
    with pytest.raises(ValueError, match="262144"):
        emulator.video_sparse_attn(x, x, x, SIZES, SIZES, topk=2, block_size=64)
    with pytest.raises(ValueError, match="128 or 256"):
        emulator.video_sparse_attn_bshd(x, x, x, SIZES, SIZES, topk=2, block_size=(4, 4, 4))


def test_half_precision_does_not_compile() -> None:
    x = drawn(dtype=torch.float16)
    with pytest.raises(TypeError, match="bf16"):
        emulator.block_sparse_attn(x, x, x, everything(), SIZES)


def test_pad_rows_that_are_not_zero_are_garbage() -> None:
    x, full = drawn(), torch.ones(1, 2, 128, 64, dtype=torch.bfloat16)
    with pytest.raises(emulator.GarbageError, match="pad rows"):
        emulator.block_sparse_attn(x, full, x, everything(), SIZES)
    with pytest.raises(emulator.GarbageError, match="pad rows"):
        emulator.video_sparse_attn(full, x, x, SIZES, SIZES, topk=1, block_size=(4, 4, 4))


def test_rows_that_are_no_multiple_are_refused() -> None:
    x = drawn()[:, :, :100]
    with pytest.raises(ValueError, match="100 rows"):
        emulator.block_sparse_attn(x, x, x, everything(), SIZES)


def test_the_compiled_kernel_takes_one_sample_of_two_head_dims() -> None:
    emulator.install(compiled=True)
    x = drawn(batch=2)
    with pytest.raises(RuntimeError, match="Batch"):
        emulator.block_sparse_attn(x, x, x, everything(2), SIZES)
    narrow = drawn(width=32)
    with pytest.raises(emulator.GarbageError, match="head_dim 32"):
        emulator.block_sparse_attn(narrow, narrow, narrow, everything(), SIZES)


def test_an_empty_block_visited_first_is_garbage() -> None:
    x = drawn()
    x[:, :, :64] = 0.0
    with pytest.raises(emulator.GarbageError, match="visited first"):
        emulator.block_sparse_attn(x, x, x, everything(), torch.tensor([0, 40], dtype=torch.int32))


def test_fewer_kv_heads_are_read_out_of_bounds() -> None:
    x = drawn()
    with pytest.raises(emulator.GarbageError, match="KV heads"):
        emulator.block_sparse_attn(x, x[:, :1], x[:, :1], everything(), SIZES)


def test_a_wide_range_of_scores_defeats_the_choice() -> None:
    scores = torch.linspace(0, 1, 100)
    assert emulator._bisected(scores, 10).sum() == 10
    scores[50] = -1e30
    assert emulator._bisected(scores, 10).sum() == 99


def test_without_a_device_the_import_raises_a_runtime_error() -> None:
    emulator.install(device=False)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        importlib.import_module("fastvideo_kernel")
