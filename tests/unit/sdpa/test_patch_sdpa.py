"""`pa.patch_sdpa`: torch's own meanings, in one scope and thread."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import polyattn as pa

Q = torch.randn(2, 4, 5, 8)
K = torch.randn(2, 4, 7, 8)


def both(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    with pa.patch_sdpa(), pa.record_routes() as log:
        ours = F.scaled_dot_product_attention(*args, **kwargs)  # type: ignore[arg-type]
    assert len(log.entries) == 1
    return ours, F.scaled_dot_product_attention(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mask",
    [
        torch.rand(5, 7) > 0.3,  # [Sq, Sk]
        torch.rand(4, 5, 7) > 0.3,  # broadcasts over heads
        torch.rand(2, 1, 5, 7) > 0.3,
        torch.randn(2, 4, 5, 7),
        torch.rand(5, 1) > 0.3,
    ],
)
def test_masks_mean_what_torch_says(mask: torch.Tensor) -> None:
    ours, torchs = both(Q, K, K, attn_mask=mask)
    torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=0)


def test_is_causal_is_top_left() -> None:
    torch.testing.assert_close(*both(Q, K, K, is_causal=True), atol=1e-5, rtol=0)
    torch.testing.assert_close(*both(Q, Q, Q, is_causal=True), atol=1e-5, rtol=0)


def test_gqa_scale_and_other_ranks() -> None:
    torch.testing.assert_close(*both(Q, K[:, :2], K[:, :2], enable_gqa=True, scale=0.2), atol=1e-5, rtol=0)
    torch.testing.assert_close(*both(Q[0], K[0], K[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        *both(Q[None], K[None], K[None], attn_mask=torch.rand(2, 1, 5, 7) > 0.3), atol=1e-5, rtol=0
    )


def test_a_function_imported_by_value_is_caught_too() -> None:
    by_value = F.scaled_dot_product_attention
    with pa.patch_sdpa(), pa.record_routes() as log:
        by_value(Q, K, K)
    assert len(log.entries) == 1


def test_scopes_nest_and_name_a_backend() -> None:
    with pa.patch_sdpa("blocked"), pa.record_routes() as log:
        F.scaled_dot_product_attention(Q, K, K)
        with pa.patch_sdpa("sdpa"):
            F.scaled_dot_product_attention(Q, K, K)
        F.scaled_dot_product_attention(Q, K, K)
    assert [(entry.route, entry.count) for entry in log.entries] == [("cpu:blocked", 2), ("cpu:sdpa", 1)]


def test_what_torch_refuses_or_we_cannot_serve_is_refused() -> None:
    with pa.patch_sdpa():
        with pytest.raises(pa.UnsupportedRequest, match="dropout"):
            F.scaled_dot_product_attention(Q, K, K, dropout_p=0.1)
        with pytest.raises(ValueError, match="enable_gqa"):
            F.scaled_dot_product_attention(Q, K[:, :2], K[:, :2])


def test_a_stock_module_runs_through_it_and_other_threads_do_not() -> None:
    stock = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 5, 32)
    seen: list[int] = []
    with pa.patch_sdpa(), pa.record_routes() as log:
        ours = stock(x, x, x, need_weights=False)[0]

        def elsewhere() -> None:
            with pa.record_routes() as other:
                F.scaled_dot_product_attention(Q, K, K)
            seen.append(len(other.entries))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert log.entries
    assert seen == [0]
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    torch.testing.assert_close(ours, stock(x, x, x, need_weights=False)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)),
        ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (1, 4, 7, 8)),
        ((2, 4, 5, 8), (4, 7, 8), (4, 7, 8)),
    ],
)
def test_batch_and_heads_broadcast(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape) for shape in (q, k, v)]
    for mask in (None, torch.rand(2, 1, 5, 7) > 0.2):
        if mask is None or q[0] == 2:
            torch.testing.assert_close(*both(*tensors, attn_mask=mask), atol=1e-5, rtol=0)
    grouped = [torch.randn(2, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)]
    torch.testing.assert_close(*both(*grouped, enable_gqa=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((5, 8), (7, 8)),
        ((2, 4, 0, 8), (2, 4, 7, 8)),
        ((2, 4, 5, 8), (2, 4, 0, 8)),
        ((0, 4, 5, 8), (0, 4, 7, 8)),
        ((2, 4, 5, 0), (2, 4, 7, 0)),
    ],
)
def test_what_has_no_heads_or_no_elements_is_torchs(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    query, key = torch.randn(q), torch.randn(k)
    with pa.patch_sdpa(), pa.record_routes() as log:
        ours = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    assert not log.entries
    torchs = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    torch.testing.assert_close(ours, torchs, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_are_torchs() -> None:
    rows = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(2, 4, 8)], layout=torch.jagged).transpose(1, 2)
    with pa.patch_sdpa():
        ours = F.scaled_dot_product_attention(rows, rows, rows)
    torch.testing.assert_close(ours.values(), F.scaled_dot_product_attention(rows, rows, rows).values())
