"""Padded batches behind transformers' registries: the numbers of SDPA on kept rows, caches and generation included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

import polyattn as pa
from polyattn.integrations import transformers as bridge
from tests.integrations.transformers_models import CACHE_BY_ITS_OLD_NAME, CLOSE, VOCABULARY, bert, llama, padded, run

pytestmark = pytest.mark.usefixtures("installed")


class TestPaddedEncoder:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_equals_sdpa(self, side, calls):
        model, (ids, mask) = bert(), padded(side)
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        theirs = run(model, "sdpa", input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert [type(call.structure) for call in calls] == [pa.KeyPadding] * 3

    def test_the_mask_matters(self):
        model, (ids, mask) = bert(), padded("left")
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        assert (ours - run(model, "polyattn", input_ids=ids))[mask.bool()].abs().max() > 1e-3

    def test_one_structure_serves_all_layers(self, calls):
        ids, mask = padded("left")
        run(bert(), "polyattn", input_ids=ids, attention_mask=mask)
        assert len({id(call.structure) for call in calls}) == 1
        assert calls[0].structure.builds == 1

    @pytest.mark.parametrize("mask", [None, torch.ones(2, 9, dtype=torch.long)])
    def test_without_padding_there_is_no_structure(self, mask, calls):
        model, ids = bert(), torch.randint(1, VOCABULARY, (2, 9))
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(ours, run(model, "sdpa", input_ids=ids), **CLOSE)
        assert {call.structure for call in calls} == {None}

    def test_cross_attention_keeps_every_query_even_where_there_are_as_many_keys(self):
        model = bert(is_decoder=True, add_cross_attention=True)
        ids, mask = padded("right")
        inputs = {"input_ids": ids, "encoder_hidden_states": torch.randn(3, 12, 32), "encoder_attention_mask": mask}
        torch.testing.assert_close(run(model, "polyattn", **inputs), run(model, "sdpa", **inputs), **CLOSE)

    def test_a_mask_over_keys_hides_keys_alone(self):
        q, keep = torch.randn(1, 2, 4, 8), torch.tensor([[True, True, True, False]])
        module = SimpleNamespace(is_causal=False)
        of_keys, whole = (bridge.attention(module, q, q, q, mask)[0] for mask in (keep, keep[:, None, None]))
        alone = bridge.attention(module, q, q[:, :, :3], q[:, :, :3], None)[0]
        torch.testing.assert_close(of_keys, alone, **CLOSE)
        torch.testing.assert_close(whole, alone, **CLOSE)

    def test_gradients_equal_those_of_sdpa(self):
        model, (ids, mask) = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), padded("right")
        gradients = []
        for name in ("sdpa", "polyattn"):
            model.set_attn_implementation(name)
            model.zero_grad()
            model(input_ids=ids, attention_mask=mask)[0][mask.bool()].square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


class TestPaddedCausal:
    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_kept_rows_equal_sdpa(self, side, kv_heads):
        model, (ids, mask) = llama(kv_heads), padded(side)
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        theirs = run(model, "sdpa", input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)

    def test_the_mask_is_two_dimensional_and_shared(self, calls):
        ids, mask = padded("left")
        run(llama(), "polyattn", input_ids=ids, attention_mask=mask)
        assert len({id(call.structure) for call in calls}) == 1
        assert all(call.causal and call.structure.builds == 1 for call in calls)

    def test_generation_from_a_padded_batch_says_the_same(self):
        model, (ids, mask) = llama(), padded("left")
        said = []
        for name in ("sdpa", "polyattn"):
            model.set_attn_implementation(name)
            said.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0))
        assert said[0].shape == (3, 18)
        assert torch.equal(*said)

    @CACHE_BY_ITS_OLD_NAME
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_a_second_chunk_sees_the_first(self, kind):
        model, ids = llama(), torch.randint(1, VOCABULARY, (2, 10))
        caches = {"dynamic": transformers.DynamicCache, "static": transformers.StaticCache}
        cache = caches[kind](config=model.config, **({"max_cache_len": 16} if kind == "static" else {}))
        chunks = [run(model, "polyattn", input_ids=part, past_key_values=cache) for part in ids.split((6, 4), dim=1)]
        torch.testing.assert_close(torch.cat(chunks, dim=1), run(model, "sdpa", input_ids=ids), **CLOSE)
