"""The function that diffusers' dispatcher calls: native's meaning of every argument, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

import polyattn as pa
from polyattn.integrations import diffusers as bridge

BATCH, HEADS, ROWS, KEYS = 2, 4, 5, 7
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(autouse=True)
def _installed():
    torch.manual_seed(0)
    bridge.install()
    yield
    bridge.uninstall()


@pytest.fixture
def qkv():
    return [torch.randn(BATCH, length, HEADS, 8) for length in (ROWS, KEYS, KEYS)]


def same_as_native(*qkv, **stated):
    with pa.record_routes() as log:
        ours = dispatch_attention_fn(*qkv, backend="polyattn", **stated)
    assert len(log.entries) == 1
    torch.testing.assert_close(ours, dispatch_attention_fn(*qkv, backend="native", **stated), **CLOSE)


@pytest.mark.parametrize(
    "shape",
    [
        (BATCH, KEYS),
        (ROWS, KEYS),
        (HEADS, ROWS, KEYS),
        (BATCH, 1, 1, KEYS),
        (BATCH, 1, ROWS, KEYS),
        (1, HEADS, 1, KEYS),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("additive", [True, False])
def test_masks_mean_what_native_says(qkv, shape, additive):
    mask = torch.randn(shape) if additive else torch.rand(shape) > 0.4
    if not additive:
        mask[..., 0] = True
    same_as_native(*qkv, attn_mask=mask)


def test_a_mask_of_rank_2_is_over_keys_where_both_readings_fit():
    q = torch.randn(ROWS, ROWS, HEADS, 8)
    mask = torch.rand(ROWS, ROWS) > 0.4
    mask[:, 0] = True
    same_as_native(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("rows", [3, KEYS, 12])
def test_the_causal_triangle_is_natives(rows):
    q, k = torch.randn(BATCH, rows, HEADS, 8), torch.randn(BATCH, KEYS, HEADS, 8)
    same_as_native(q, k, k, is_causal=True)


def test_scale_and_grouped_heads(qkv):
    q, k, v = qkv
    same_as_native(q, k, v, scale=0.3)
    same_as_native(q, k[:, :, :2], v[:, :, :2], enable_gqa=True)


def test_grouped_heads_that_nobody_asked_for_are_refused_as_native_refuses_them(qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="enable_gqa"):
        dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2], backend="polyattn")
    with pytest.raises(RuntimeError):
        dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2], backend="native")


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("return_lse", {"attention_kwargs": {"return_lse": True}}),
        ("_parallel_config", {"parallel_config": object()}),
        ("block_mask", {"attention_kwargs": {"block_mask": torch.ones(2)}}),
        ("window_size", {"attention_kwargs": {"window_size": (1, 1)}}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_never_dropped(qkv, name, stated):
    with pytest.raises(ValueError, match=f"^{name}: "):
        dispatch_attention_fn(*qkv, backend="polyattn", **stated)


@pytest.mark.parametrize("said", [None, False, 0, 0.0])
def test_an_argument_that_asks_for_nothing_says_nothing(qkv, said):
    same_as_native(*qkv)
    out = dispatch_attention_fn(*qkv, backend="polyattn", attention_kwargs={"window_size": said})
    assert torch.equal(out, dispatch_attention_fn(*qkv, backend="polyattn"))


def test_the_dispatch_compiles_into_one_graph(qkv):
    def attend(q, k, v, mask):
        return dispatch_attention_fn(q, k, v, mask, backend="polyattn") * 2

    mask = torch.rand(BATCH, 1, 1, KEYS) > 0.4
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(*qkv, mask)
    torch.compiler.reset()
    torch.testing.assert_close(compiled, attend(*qkv, mask), **CLOSE)
