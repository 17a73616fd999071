"""Families of transformers models give the outputs and gradients of their own SDPA, and of their eager attention."""

from __future__ import annotations

import pytest
import torch
import transformers

import polyattn as pa
from tests.integrations.transformers_models import CACHE_BY_ITS_OLD_NAME, CLOSE, LENGTHS, VOCABULARY, padded, run

pytestmark = pytest.mark.usefixtures("installed")

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
_BERT = {"num_key_value_heads", "head_dim"}
_CONFIG = {"Gemma3": "Gemma3Text"}


def causal(family, **changes):
    """A causal language model of a family, with grouped heads."""
    config = getattr(transformers, f"{_CONFIG.get(family, family)}Config")(**{**_SIZES, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def gemma2(**changes):
    # a cap small enough that leaving it out would show; a window that padding and length go past
    return causal("Gemma2", sliding_window=4, attn_logit_softcapping=0.05, query_pre_attn_scalar=8, **changes)


def gemma3(**changes):
    return causal("Gemma3", sliding_window=4, query_pre_attn_scalar=8, **changes)


def qwen3(**changes):
    return causal("Qwen3", **{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, **changes})


def mistral(**changes):
    return causal("Mistral", sliding_window=4, **changes)


CAUSAL = {
    "Llama": lambda: causal("Llama"), "Qwen3": qwen3, "Mistral": mistral,
    "Gemma2": gemma2, "Gemma3": gemma3,
}  # fmt: skip
#: SDPA has no softcap: transformers warns and leaves it out, so that only eager says what is right.
ORACLES = {name: ("eager",) if name == "Gemma2" else ("sdpa", "eager") for name in CAUSAL}
every_family = pytest.mark.parametrize(
    ("make", "oracle"),
    [
        pytest.param(CAUSAL[name], oracle, id=f"{name} as {oracle}")
        for name, oracles in ORACLES.items()
        for oracle in oracles
    ],
)


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False).eval()


def bert():
    sizes = {name: size for name, size in _SIZES.items() if name not in _BERT}
    return transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()


@every_family
class TestCausal:
    def test_a_dense_batch(self, make, oracle, calls):
        model, ids = make(), torch.randint(1, VOCABULARY, (2, 9))
        with pa.record_routes() as log:
            ours = run(model, "polyattn", input_ids=ids)
        assert sum(entry.count for entry in log.entries) == len(calls) == 4
        torch.testing.assert_close(ours, run(model, oracle, input_ids=ids), **CLOSE)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_a_padded_batch(self, make, oracle, side):
        model, (ids, mask) = make(), padded(side)
        inputs = {"input_ids": ids, "attention_mask": mask}
        kept = mask.bool()
        ours, theirs = run(model, "polyattn", **inputs)[kept], run(model, oracle, **inputs)[kept]
        torch.testing.assert_close(ours, theirs, **CLOSE)

    @CACHE_BY_ITS_OLD_NAME
    def test_tokens_one_by_one_behind_a_cache(self, make, oracle):
        model, ids = make(), torch.randint(1, VOCABULARY, (2, 9))
        cache = transformers.DynamicCache(config=model.config)
        parts = [run(model, "polyattn", input_ids=part, past_key_values=cache) for part in ids.split((6, 1, 1, 1), 1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), run(model, oracle, input_ids=ids), **CLOSE)

    def test_gradients(self, make, oracle):
        model, (ids, mask) = make(), padded("right")
        found = []
        for name in ("polyattn", oracle):
            model.set_attn_implementation(name)
            model.zero_grad()
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            logits[mask.bool()].square().mean().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        assert any(gradient.abs().max() > 1e-3 for gradient in found[0])
        torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("oracle", ["sdpa", "eager"])
class TestBidirectional:
    def test_vit(self, oracle, calls):
        model, pixels = vit(), torch.randn(2, 3, 16, 16)
        ours = run(model, "polyattn", pixel_values=pixels)
        torch.testing.assert_close(ours, run(model, oracle, pixel_values=pixels), **CLOSE)
        assert [(call.structure, call.causal) for call in calls] == [(None, False)] * 3

    def test_bert(self, oracle):
        model, (ids, mask) = bert(), padded("right")
        inputs = {"input_ids": ids, "attention_mask": mask}
        kept = mask.bool()
        ours, theirs = run(model, "polyattn", **inputs)[kept], run(model, oracle, **inputs)[kept]
        assert ours.shape[0] == sum(LENGTHS)
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_the_softcap_of_gemma2_matters():
    model, ids = gemma2(), torch.randint(1, VOCABULARY, (2, 9))
    capped = run(model, "polyattn", input_ids=ids)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (run(model, "polyattn", input_ids=ids) - capped).abs().max() > 1e-4


#: Of one layer, and so with no way past its window.
ONE_WINDOW = {
    "Qwen3": lambda: qwen3(max_window_layers=0, num_hidden_layers=1),
    "Mistral": lambda: mistral(num_hidden_layers=1),
    "Gemma2": lambda: gemma2(num_hidden_layers=1),
    "Gemma3": lambda: gemma3(num_hidden_layers=1),
}


@pytest.mark.parametrize("make", ONE_WINDOW.values(), ids=ONE_WINDOW)
def test_the_window_of_a_family_matters(make):
    ids = torch.randint(1, VOCABULARY, (2, 9))
    other = ids.clone()
    other[:, 0] = ids[:, 0] % (VOCABULARY - 1) + 1
    model = make()
    one, two = (run(model, "polyattn", input_ids=each) for each in (ids, other))
    assert (one - two)[:, :4].abs().amax(dim=(0, 2)).gt(1e-5).all()
    torch.testing.assert_close(one[:, 4:], two[:, 4:], **CLOSE)
