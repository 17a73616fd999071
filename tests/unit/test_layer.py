"""`pa.Attention`: what a layer keeps, refuses, and tells; `pa.configure`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import polyattn as pa

Q = torch.randn(2, 6, 4, 8)
KV = torch.randn(2, 6, 2, 8)


def test_a_layer_answers_as_the_function_does() -> None:
    layer = pa.Attention(4, 8, 2, scale=0.3, causal=True, softcap=4.0)
    want, lse = pa.attention(Q, KV, KV, scale=0.3, causal=True, softcap=4.0, return_lse=True)
    got, got_lse = layer(Q, KV, KV, return_lse=True)
    assert torch.equal(got, want)
    assert torch.equal(got_lse, lse)
    assert layer.last_route is not None
    assert layer.last_route.platform == "cpu"


def test_a_layer_refuses_other_head_counts() -> None:
    with pytest.raises(ValueError, match="4 heads of 8"):
        pa.Attention(4, 8, 2)(KV, KV, KV)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_heads": 0, "head_dim": 8}, "num_heads"),
        ({"num_heads": 4, "head_dim": 8, "num_kv_heads": 3}, "num_kv_heads"),
        ({"num_heads": 4, "head_dim": 8, "role": "crossed"}, "role"),
        ({"num_heads": 4, "head_dim": 8, "window": -1}, "window"),
        ({"num_heads": 4, "head_dim": 8, "softcap": -1.0}, "softcap"),
        ({"num_heads": 4, "head_dim": 8, "scale": float("nan")}, "scale"),
        ({"num_heads": 4, "head_dim": 8, "backend": "flash_attnn"}, "flash_attnn"),
    ],
)
def test_bad_arguments_are_refused_at_construction_by_name(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pa.Attention(**arguments)  # type: ignore[arg-type]


def test_a_cross_layer_keeps_every_query_row() -> None:
    q = torch.zeros(1, 3, 1, 8)
    v = torch.tensor([1.0, 3.0, 9.0]).reshape(1, 3, 1, 1).expand(1, 3, 1, 8)
    padding = pa.KeyPadding.from_lengths([2], 3)
    assert pa.Attention(1, 8, role="cross")(q, q, v, padding)[0, :, 0, 0].tolist() == [2.0, 2.0, 2.0]
    assert pa.Attention(1, 8)(q, q, v, padding)[0, :, 0, 0].tolist() == [2.0, 2.0, 0.0]
    with pytest.raises(ValueError, match="cross"):
        pa.Attention(1, 8, role="cross")(q, q, v, pa.KeyPadding.from_lengths([2], 3, queries="same"))


def test_layers_share_one_preparation_of_a_structure() -> None:
    padding = pa.KeyPadding.from_mask(torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]]))
    layers = [pa.Attention(4, 8, 2) for _ in range(5)]
    for layer in layers:
        layer(Q, KV, KV, padding)
    assert padding.builds == 1
    cross = [pa.Attention(4, 8, 2, role="cross") for _ in range(5)]
    for layer in cross:
        layer(Q, KV, KV, padding)
    assert padding.with_queries("all").builds == 1


def test_supports_asks_one_slot_for_all() -> None:
    layer = pa.Attention(4, 8, 2)
    assert layer.supports(pa.Capability.MULTI_DOC_VARLEN | pa.Capability.LSE, dtype=torch.bfloat16, device="cpu")
    assert not layer.supports(pa.Capability.QUANT_FP8)
    assert not layer.supports(pa.Capability.LSE, dtype=torch.float8_e4m3fn)
    odd = pa.Attention(6, 7, 3)
    assert odd.supports(pa.Capability.BACKWARD | pa.Capability.PAGED_KV | pa.Capability.SPANS, device="cpu:0")


def test_a_layer_copies_pickles_and_holds_no_state() -> None:
    layer = pa.Attention(4, 8, 2, causal=True, prefix="blocks.3.attn")
    layer(Q, KV, KV)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.last_route is None
        assert twin.layer_index == 3
        assert torch.equal(twin(Q, KV, KV), layer(Q, KV, KV))
    assert layer.state_dict() == {}
    assert list(layer.parameters()) == []


def model() -> torch.nn.Module:
    blocks = torch.nn.ModuleList()
    for index in range(3):
        attn = pa.Attention(2, 8, prefix=f"blocks.{index}.attn")
        cross = pa.Attention(2, 8, role="cross", prefix=f"blocks.{index}.cross")
        blocks.append(torch.nn.ModuleDict({"attn": attn, "cross": cross}))
    return torch.nn.ModuleDict({"blocks": blocks})


def route(layer: torch.nn.Module) -> str:
    q = torch.randn(1, 4, 2, 8)
    layer(q, q, q)
    return layer.last_route.name  # type: ignore[union-attr]


def test_configure_goes_by_role_and_names_win_over_roles() -> None:
    net = model()
    pa.configure(net, {"blocks.0.*": "sdpa", "self": "blocked"})
    assert route(net.blocks[0].attn) == "cpu:sdpa"  # type: ignore[union-attr]
    assert route(net.blocks[1].attn) == "cpu:blocked"  # type: ignore[union-attr]
    assert route(net.blocks[1].cross) == "cpu:sdpa"  # type: ignore[union-attr]
    pa.configure(net, {"self": None})
    assert route(net.blocks[1].attn) == "cpu:sdpa"  # type: ignore[union-attr]


def test_a_scope_is_stronger_than_configure_and_an_argument_than_both() -> None:
    net = model()
    pa.configure(net, {"self": "blocked"})
    with pa.use_backend("sdpa"):
        assert route(net.blocks[0].attn) == "cpu:sdpa"  # type: ignore[union-attr]
    layer = pa.Attention(2, 8, backend="blocked")
    pa.configure(torch.nn.ModuleList([layer]), {"self": "sdpa"})
    assert route(layer) == "cpu:blocked"


def test_configure_refuses_unknown_backends_and_modules() -> None:
    with pytest.raises(ValueError, match="flash_attnn"):
        pa.configure(model(), {"self": "flash_attnn"})
    with pytest.raises(ValueError, match=r"'bloks\.0\.\*'"):
        pa.configure(model(), {"bloks.0.*": "sdpa"})
