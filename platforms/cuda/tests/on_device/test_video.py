"""What diffusion and video models ask of attention, at sizes of several tiles: caches, ragged rows, frames, ranges."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import (
    DEVICE,
    Name,
    assert_near,
    assert_right,
    attend,
    dtype_of,
    every_backend,
    exact,
    qkv,
    takes,
)

pytestmark = pytest.mark.cuda


@every_backend
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_contiguous_cache_with_valid_lengths_per_row(backend: Name, on_device: bool) -> None:
    q, k, v = qkv((4, 64), (4, 1000), kv_heads=2, dtype=dtype_of(backend))
    lengths = [1000, 1, 333, 0]
    for row, length in enumerate(lengths):
        for cache in (k, v):
            cache[row, length:] = float("nan")
    given = torch.tensor(lengths, device=DEVICE) if on_device else lengths
    valid = pa.KeyPadding.from_lengths(given, 1000, queries="all")
    assert_right(attend(backend, q, k, v, structure=valid), q, k, v, structure=valid)


@every_backend
def test_a_cache_that_grows_serves_each_step(backend: Name) -> None:
    q, k, v = qkv((2, 1), (2, 300), dtype=dtype_of(backend))
    lengths = torch.tensor([250, 17], device=DEVICE)
    for _ in range(3):
        valid = pa.KeyPadding.from_lengths(lengths, 300, queries="all")
        assert_right(attend(backend, q, k, v, structure=valid), q, k, v, structure=valid)
        lengths = lengths + 1


@every_backend
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_ragged_rows_in_a_padded_batch(backend: Name, causal: bool) -> None:
    q, k, v = qkv((5, 300), heads=6, kv_heads=2, dim=64, dtype=dtype_of(backend))
    ragged = pa.KeyPadding.from_lengths([300, 129, 0, 1, 256], 300)
    out = attend(backend, q, k, v, structure=ragged, causal=causal)
    assert_right(out, q, k, v, structure=ragged, causal=causal)


@every_backend
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_ragged_new_tokens_over_pages(backend: Name, layout: str) -> None:
    new, kept = [40, 1, 17], [140, 64, 17]
    table = [[4, 1, 6], [2, -1, -1], [0, -1, -1]]
    rows = (3, 40) if layout == "padded" else (58,)
    q, k, v = qkv(rows, (8, 64), kv_heads=2, dtype=dtype_of(backend))
    pages = pa.Paged(table, kept, new)
    out = attend(backend, q, k, v, structure=pages, causal=True)
    assert_right(out, q, k, v, structure=pages, causal=True)


@every_backend
def test_a_cache_written_once_serves_every_segment(backend: Name) -> None:
    dtype = dtype_of(backend)
    _, k, v = qkv((1, 1), (200,), kv_heads=2, dim=64, dtype=dtype)
    q, *_ = qkv((1, 150), dim=64, dtype=dtype)
    cache = pa.PagedKVCache(6, 64, 2, 64, dtype, DEVICE)
    cache.write(k, v, torch.arange(200) + 64)  # pages 1 to 4
    pages = pa.Paged([[1, 2, 3, 4]], [200], spans=[[(60, 130), (150, 190)]])
    out = attend(backend, q, cache.k, cache.v, structure=pages)
    spans = pa.Spans([[(60, 130), (150, 190)]])
    assert_near(out, exact(q, k[None], v[None], structure=spans))


@every_backend
def test_block_causal_video_by_frames(backend: Name) -> None:
    frames, tokens = 5, 70
    q, k, v = qkv((2, frames * tokens), dtype=dtype_of(backend))
    by_frame = pa.Spans([[(tokens * i, tokens * (i + 1)) for i in range(frames)]] * 2)
    frame = torch.arange(frames * tokens) // tokens
    seen = pa.Mask(frame[None, None, :, None] >= frame[None, None, None, :])
    out = attend(backend, q, k, v, structure=by_frame)
    assert_near(out, exact(q, k, v, structure=seen))


@every_backend
def test_the_newest_frames_over_a_cache_of_those_before(backend: Name) -> None:
    q, k, v = qkv((1, 140), (1, 350), dtype=dtype_of(backend))
    by_frame = pa.Spans([[(70 * i, 70 * (i + 1)) for i in range(5)]])
    assert_right(attend(backend, q, k, v, structure=by_frame), q, k, v, structure=by_frame)


@every_backend
def test_text_before_images_twice(backend: Name) -> None:
    q, k, v = qkv((1, 2 * (64 + 300)), heads=4, kv_heads=2, dtype=dtype_of(backend))
    spans = pa.Spans([[(64, 364), (428, 728)]])
    assert_right(attend(backend, q, k, v, structure=spans), q, k, v, structure=spans)


@every_backend
def test_queries_that_sit_in_several_places(backend: Name) -> None:
    q, k, v = qkv((2, 200), (2, 500), dtype=dtype_of(backend))
    spans = pa.Spans([[(30, 150), (260, 480)], [(0, 64)]], query_ranges=[(0, 64, 0), (64, 128, 300), (128, 200, 200)])
    assert_right(attend(backend, q, k, v, structure=spans), q, k, v, structure=spans)


@every_backend
def test_one_documents_nan_is_not_anothers(backend: Name) -> None:
    q, k, v = qkv((700,), dtype=dtype_of(backend))
    k[200:203], v[330:340] = float("nan"), float("inf")
    documents = pa.Packed.from_lengths([200, 300, 200])
    out = attend(backend, q, k, v, structure=documents)
    clean = pa.Packed.from_lengths([200, 200])
    kept = torch.cat([torch.arange(200), torch.arange(500, 700)]).to(q.device)
    assert_near(out[kept], exact(q[kept], k[kept], v[kept], structure=clean))


def test_float32_is_routed_away_openly() -> None:
    q, k, v = qkv((1, 300), dtype=torch.float32)
    explanation = pa.explain(q, k, v)
    assert explanation.chosen is not None
    assert explanation.chosen.backend.name != "fa3"
    reasons = explanation.chosen.reasons["fa3"]
    if any("not installed" in reason for reason in reasons):
        pytest.skip(f"fa3: {'; '.join(reasons)}")
    assert any("float32" in reason for reason in reasons)
    assert "float32" in str(explanation)
    layer = pa.Attention(8, 128)
    out = layer(q, k, v)
    torch.testing.assert_close(out.cpu().double(), exact(q, k, v), atol=2e-5, rtol=0)
    assert layer.last_route.backend.name == explanation.chosen.backend.name
    half = [tensor.bfloat16() for tensor in (q, k, v)]
    layer(*half)
    assert layer.last_route.backend.name == pa.explain(*half).chosen.backend.name
    with pytest.raises(pa.UnsupportedRequest, match="float32"):
        pa.attention(q, k, v, backend="fa3")


@takes("deterministic")
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", ["dense", "packed", "key_padding"])
def test_deterministic_calls_give_the_same_bits(backend: Name, name: str, grad: bool) -> None:
    given, rows = {
        "dense": ({"causal": True}, (2, 700)),
        "packed": ({"structure": pa.Packed.from_lengths([500, 3, 197])}, (700,)),
        "key_padding": ({"structure": pa.KeyPadding.from_lengths([700, 333], 700)}, (2, 700)),
    }[name]
    inputs = [tensor.requires_grad_(grad) for tensor in qkv(rows, heads=4, kv_heads=2, dtype=dtype_of(backend))]
    runs = []
    for _ in range(4):
        out = attend(backend, *inputs, **given, deterministic=True)
        runs.append((out, *(torch.autograd.grad(out.float().square().sum(), inputs) if grad else ())))
    assert all(torch.equal(one, first) for run in runs[1:] for one, first in zip(run, runs[0], strict=True))
