"""polyattn behind transformers' registries: the numbers of SDPA on kept rows, and a refusal by name for the rest."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

import polyattn as pa

transformers = pytest.importorskip("transformers", minversion="5.4")
bridge = pytest.importorskip("polyattn.integrations.transformers")

CLOSE = {"rtol": 0.0, "atol": 1e-5}
LENGTHS = (7, 12, 1)
VOCABULARY = 50
CACHE_BY_ITS_OLD_NAME = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _installed():
    torch.manual_seed(0)
    bridge.install()


@pytest.fixture
def calls(monkeypatch):
    """Every `Call` that the attention function makes of its arguments, in order."""
    seen = []
    translate = bridge.translate

    def spy(*arguments):
        seen.append(translate(*arguments))
        return seen[-1]

    monkeypatch.setattr(bridge, "translate", spy)
    return seen


def bert(**changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **{**sizes, **changes})
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def llama(kv_heads=2, **changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=kv_heads, **{**sizes, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def mistral(sliding_window):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=sliding_window, **sizes
    )
    return transformers.MistralForCausalLM(config).eval()


def run(model, name, **inputs):
    """Hidden states or logits with the attention of that name."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(**inputs)[0]


def padded(side, lengths=LENGTHS):
    """(input_ids, attention_mask) with padding on that side."""
    ids = torch.randint(1, VOCABULARY, (len(lengths), max(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids, mask if side == "right" else mask.flip(1)


def packed(lengths=LENGTHS):
    """(input_ids [1,T], position_ids [1,T], cu_seq_lens [documents + 1])."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return torch.randint(1, VOCABULARY, (1, sum(lengths))), positions, boundaries


def one_by_one(model, ids, lengths=LENGTHS):
    """What transformers' SDPA makes of each document alone."""
    return torch.cat([run(model, "sdpa", input_ids=part) for part in ids.split(list(lengths), dim=1)], dim=1)


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


class TestPacked:
    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("stated", ["boundaries", "positions", "both"])
    def test_documents_of_a_causal_model_do_not_see_each_other(self, stated, use_cache, calls):
        model, (ids, positions, boundaries) = llama(), packed()
        inputs = {"position_ids": positions} if stated != "boundaries" else {}
        if stated != "positions":
            inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
        ours = run(model, "polyattn", input_ids=ids, use_cache=use_cache, **inputs)
        assert [type(call.structure) for call in calls] == [pa.Packed] * 3
        assert len({id(call.structure) for call in calls}) == 1
        assert calls[0].structure.builds == 1
        assert calls[0].structure.lengths_q == LENGTHS
        # rotary positions are relative: with boundaries alone the sums differ in their rounding only
        torch.testing.assert_close(ours, one_by_one(model, ids), **CLOSE)

    @pytest.mark.parametrize("boundaries_too", [True, False])
    def test_documents_of_an_encoder_do_not_see_each_other(self, boundaries_too, calls):
        model, (ids, positions, boundaries) = bert(), packed()
        more = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": 12, "max_length_k": 12}
        ours = run(model, "polyattn", input_ids=ids, position_ids=positions, **(more if boundaries_too else {}))
        torch.testing.assert_close(ours, one_by_one(model, ids), **CLOSE)
        assert {call.structure.lengths_q for call in calls} == {LENGTHS}

    @pytest.mark.parametrize("use_cache", [True, False])
    def test_several_rows_of_documents(self, use_cache):
        model, (ids, positions, _) = llama(), packed((5, 3, 5, 3))
        inputs = {"input_ids": ids.reshape(2, 8), "position_ids": positions.reshape(2, 8), "use_cache": use_cache}
        ours = run(model, "polyattn", **inputs)
        torch.testing.assert_close(ours.reshape(1, 16, -1), one_by_one(model, ids, (5, 3, 5, 3)), **CLOSE)

    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("stated", ["boundaries", "positions"])
    def test_windows_hold_within_documents(self, stated, use_cache, calls):
        model, (ids, positions, boundaries) = mistral(4), packed()
        more = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries} if stated == "boundaries" else {}
        ours = run(model, "polyattn", input_ids=ids, position_ids=positions, use_cache=use_cache, **more)
        torch.testing.assert_close(ours, one_by_one(model, ids), **CLOSE)

    def test_rows_past_the_last_boundary_are_nobodys(self):
        model, (ids, positions, boundaries) = llama(), packed()
        ids = torch.cat([ids, ids[:, :4]], dim=1)
        positions = torch.cat([positions, torch.zeros(1, 4, dtype=torch.long)], dim=1)
        inputs = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "use_cache": False}
        ours = run(model, "polyattn", input_ids=ids, position_ids=positions, **inputs)
        torch.testing.assert_close(ours[:, :-4], one_by_one(model, ids[:, :-4]), **CLOSE)

    @pytest.mark.parametrize("rank", [2, 4])
    def test_documents_and_a_mask_that_hides_more_are_refused(self, rank):
        ids, _, boundaries = packed()
        hidden = torch.ones_like(ids) if rank == 2 else torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
        hidden[..., 2] = 0
        with pytest.raises(ValueError, match="attention_mask, cu_seq_lens_q"):
            run(llama(), "polyattn", input_ids=ids, attention_mask=hidden, cu_seq_lens_q=boundaries)

    @CACHE_BY_ITS_OLD_NAME
    def test_documents_beside_cached_keys_are_refused(self):
        model, (ids, positions, _) = llama(), packed()
        cache = transformers.DynamicCache(config=model.config)
        run(model, "polyattn", input_ids=ids[:, :5], past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids: "):
            run(model, "polyattn", input_ids=ids, position_ids=positions, past_key_values=cache)

    @pytest.mark.parametrize("heads", [1, 4])
    def test_a_mask_that_is_more_than_its_documents_is_taken_as_it_is(self, heads, calls):
        model, (ids, positions, _) = llama(), packed((4, 4))
        mask = torch.ones(8, 8, dtype=torch.bool).tril().repeat(1, heads, 1, 1)
        mask[:, -1, 6, 1] = False  # documents may see each other, and the last head does not see one key
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        torch.testing.assert_close(run(model, "polyattn", **inputs), run(model, "sdpa", **inputs), **CLOSE)
        assert [type(call.structure) for call in calls] == [pa.Mask] * 3


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


class TestCompiled:
    """The whole model in one graph says what it says in eager mode, though nothing can be read while tracing."""

    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    def same_as_eager(self, model, **inputs):
        eager = run(model, "polyattn", **inputs)
        compiled = run(torch.compile(model, fullgraph=True, backend="eager"), "polyattn", **inputs)
        torch.testing.assert_close(compiled, eager, **CLOSE)

    @pytest.mark.parametrize("make", [bert, llama])
    def test_padded(self, make):
        ids, mask = padded("left")
        self.same_as_eager(make(), input_ids=ids, attention_mask=mask)

    @pytest.mark.parametrize("stated", ["boundaries", "positions", "both"])
    @pytest.mark.parametrize("make", [bert, llama, lambda: mistral(4)])
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_packed(self, make, stated, use_cache):
        model, (ids, positions, boundaries) = make(), packed()
        more = {"cu_seq_lens_q": boundaries, "max_length_q": 12} if stated != "positions" else {}
        more |= {"position_ids": positions} if stated != "boundaries" else {}
        if model.config.model_type != "bert":
            more["use_cache"] = use_cache
        self.same_as_eager(model, input_ids=ids, **more)


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
