"""Packed documents behind transformers' registries do not see each other, eagerly and in one compiled graph."""

from __future__ import annotations

import pytest
import torch
import transformers

import polyattn as pa
from tests.integrations.transformers_models import (
    CACHE_BY_ITS_OLD_NAME,
    CLOSE,
    LENGTHS,
    bert,
    llama,
    mistral,
    one_by_one,
    packed,
    padded,
    run,
)

pytestmark = pytest.mark.usefixtures("installed")


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
