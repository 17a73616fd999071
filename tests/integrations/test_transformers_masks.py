"""Windows and masks of the user's own behind transformers' registries, and what layers share of them."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers

import polyattn as pa
from tests.integrations.transformers_models import CLOSE, VOCABULARY, llama, mistral, packed, padded, run

pytestmark = pytest.mark.usefixtures("installed")


class TestWindowsAndMasks:
    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("sliding_window", [4, 64])
    def test_sliding_windows_equal_sdpa(self, side, sliding_window):
        model, (ids, mask) = mistral(sliding_window), padded(side)
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        theirs = run(model, "sdpa", input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)

    def test_a_sliding_cache_equals_sdpa(self):
        model, ids = mistral(4), torch.randint(1, VOCABULARY, (2, 9))
        said = []
        for name in ("sdpa", "polyattn"):
            model.set_attn_implementation(name)
            said.append(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))
        assert torch.equal(*said)

    def test_windows_of_an_encoder_equal_sdpa(self):
        config = transformers.ModernBertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
            local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2,
        )  # fmt: skip
        model, (ids, mask) = transformers.ModernBertModel(config).eval(), padded("right")
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        theirs = run(model, "sdpa", input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)

    def test_softcap_equals_eager(self):
        config = transformers.Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=48, sliding_window=4, attn_logit_softcapping=0.05, query_pre_attn_scalar=8,
        )  # fmt: skip
        model, ids = transformers.Gemma2ForCausalLM(config).eval(), torch.randint(1, VOCABULARY, (2, 9))
        torch.testing.assert_close(run(model, "polyattn", input_ids=ids), run(model, "eager", input_ids=ids), **CLOSE)

    @pytest.mark.parametrize("additive", [True, False])
    def test_a_mask_of_the_users_own_says_everything(self, additive, calls):
        model, ids = llama(), torch.randint(1, VOCABULARY, (2, 6))
        mask = torch.rand(2, 1, 6, 6) > 0.4
        mask[..., 0] = True
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        inputs = {"input_ids": ids, "attention_mask": mask}
        torch.testing.assert_close(run(model, "polyattn", **inputs), run(model, "sdpa", **inputs), **CLOSE)
        assert len({id(call.structure) for call in calls}) == 1
        assert not any(call.causal for call in calls)

    def test_a_causal_model_told_not_to_be(self):
        model, (ids, mask) = llama(), padded("right")
        model.config.is_causal = False
        ours = run(model, "polyattn", input_ids=ids, attention_mask=mask, is_causal=False)
        theirs = run(model, "sdpa", input_ids=ids, attention_mask=mask, is_causal=False)
        torch.testing.assert_close(ours, theirs, **CLOSE)


class TestSharing:
    def test_a_mask_changed_in_place_is_read_again(self):
        model, ids = llama(), torch.randint(1, VOCABULARY, (1, 6))
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
        run(model, "polyattn", input_ids=ids, attention_mask=mask)
        mask[..., 3:, 1] = False
        inputs = {"input_ids": ids, "attention_mask": mask}
        torch.testing.assert_close(run(model, "polyattn", **inputs), run(model, "sdpa", **inputs), **CLOSE)

    def test_positions_changed_in_place_under_inference_mode_are_read_again(self, calls):
        model = llama()
        with torch.inference_mode():
            ids, positions, _ = packed((4, 4))
            run(model, "polyattn", input_ids=ids, position_ids=positions)
            positions[0] = torch.arange(8)
            run(model, "polyattn", input_ids=ids, position_ids=positions)
        assert [type(call.structure) for call in calls] == [pa.Packed] * 3 + [type(None)] * 3
        assert len({id(call.structure) for call in calls[:3]}) == 1

    def test_nothing_is_kept_for_a_mask_that_is_gone(self):
        from polyattn.integrations import derived

        gc.collect()
        kept = len(derived._entries)
        mask = torch.zeros(1, 1, 6, 6)
        run(llama(), "polyattn", input_ids=torch.randint(1, VOCABULARY, (1, 6)), attention_mask=mask)
        assert len(derived._entries) > kept
        del mask
        gc.collect()
        assert len(derived._entries) == kept
