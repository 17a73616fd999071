"""Registering with transformers, and a refusal by name for what polyattn does not do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

import polyattn as pa
from polyattn.integrations import transformers as bridge
from tests.integrations.transformers_models import VOCABULARY, bert, llama, packed, padded, run

pytestmark = pytest.mark.usefixtures("installed")


class TestInstall:
    def test_both_registries_know_the_name_and_a_second_call_changes_nothing(self):
        assert bridge.install() == bridge.install() == "polyattn"
        assert transformers.AttentionInterface()["polyattn"] is bridge.attention
        assert transformers.AttentionMaskInterface()["polyattn"] is bridge.attention_mask

    @pytest.mark.parametrize("name", ["sdpa", "eager", "flash_polyattn", "org/polyattn", "paged|polyattn", ""])
    def test_a_name_that_transformers_uses_or_reads_a_meaning_into_is_refused(self, name):
        with pytest.raises(ValueError, match="name: "):
            bridge.install(name)

    def test_a_transformers_whose_mask_functions_differ_is_refused_with_its_version(self, monkeypatch):
        monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", lambda batch_size, cache_position, **rest: None)
        with pytest.raises(pa.BackendUnavailable, match=transformers.__version__):
            bridge.install()

    def test_another_name_works_as_well(self):
        model, (ids, mask) = bert(), padded("right")
        expected = run(model, "polyattn", input_ids=ids, attention_mask=mask)
        assert torch.equal(run(model, bridge.install("mine"), input_ids=ids, attention_mask=mask), expected)


class TestRefusals:
    @pytest.mark.parametrize(
        "name", ["s_aux", "sinks", "head_mask", "position_bias", "block_table", "output_attentions", "a_new_argument"]
    )
    def test_what_would_change_the_result_is_refused_by_name(self, name):
        q = torch.randn(1, 2, 4, 8)
        with pytest.raises(ValueError, match=f"{name}: "):
            bridge.attention(SimpleNamespace(is_causal=True), q, q, q, None, **{name: torch.ones(1)})

    @pytest.mark.parametrize("name", ["s_aux", "head_mask", "a_new_argument"])
    def test_an_argument_that_is_none_says_nothing(self, name):
        q = torch.randn(1, 2, 4, 8)
        out, weights = bridge.attention(SimpleNamespace(is_causal=True), q, q, q, None, **{name: None})
        assert out.shape == (1, 4, 2, 8)
        assert weights is None

    def test_attention_sinks_of_a_real_model_are_refused(self):
        config = transformers.GptOssConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=48, num_local_experts=2, num_experts_per_tok=1,
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(config).eval()
        with pytest.raises(ValueError, match="s_aux: "):
            run(model, "polyattn", input_ids=torch.randint(1, VOCABULARY, (1, 4)))

    def test_dropout_is_refused_in_training_and_absent_in_evaluation(self):
        model, ids = bert(attention_probs_dropout_prob=0.1), torch.randint(1, VOCABULARY, (1, 4))
        run(model, "polyattn", input_ids=ids)
        with pytest.raises(ValueError, match="dropout: "):
            run(model.train(), "polyattn", input_ids=ids)

    def test_key_boundaries_without_query_boundaries_are_refused(self):
        ids, _, boundaries = packed()
        with pytest.raises(ValueError, match="cu_seq_lens_k: "):
            run(llama(), "polyattn", input_ids=ids, cu_seq_lens_k=boundaries)

    def test_boundaries_past_the_rows_are_refused(self):
        ids, _, boundaries = packed()
        with pytest.raises(ValueError, match="cu_seqlens"):
            run(llama(), "polyattn", input_ids=ids[:, :-1], cu_seq_lens_q=boundaries)

    @pytest.mark.parametrize("shape", [(1,), (1, 4, 4)])
    def test_a_mask_of_another_rank_is_refused(self, shape):
        q = torch.randn(1, 2, 4, 8)
        with pytest.raises(ValueError, match="attention_mask: "):
            bridge.attention(SimpleNamespace(is_causal=True), q, q, q, torch.ones(shape, dtype=torch.bool))
