"""`use_polyattn`: some models and no others, within a scope, and everything put back after it."""

from __future__ import annotations

import copy
import inspect
import pickle

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch as dispatcher
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, JointAttnProcessor2_0

import polyattn as pa
from polyattn.integrations.diffusers import uninstall, use_polyattn
from tests.integrations.diffusers_image_models import IMAGE_MODELS
from tests.integrations.diffusers_video_models import VIDEO_MODELS

WAN = VIDEO_MODELS[0]
SD3, SANA, UNET = (
    next(case for case in IMAGE_MODELS if case.cls == name)
    for name in ("SD3Transformer2DModel", "SanaTransformer2DModel", "UNet2DConditionModel")
)
BOTH_KINDS = pytest.mark.parametrize("case", [WAN, SD3], ids=["dispatched", "patched"])


@pytest.fixture(autouse=True)
def _without_the_name():
    yield
    uninstall()


def processors(model):
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


def state(model):
    return [(id(processor), type(processor), dict(vars(processor))) for processor in processors(model)]


def calls(model, case):
    with torch.no_grad(), pa.record_routes() as log:
        model(**case.arguments(False))
    return sum(entry.count for entry in log.entries)


class TestScope:
    @BOTH_KINDS
    def test_the_processors_are_put_back(self, case):
        model = case.build()
        before = state(model)
        with use_polyattn(model):
            assert state(model) != before
            assert calls(model, case) == len(before)
        assert state(model) == before
        assert calls(model, case) == 0

    @BOTH_KINDS
    def test_they_are_put_back_after_an_error(self, case):
        model = case.build()
        before = state(model)
        with pytest.raises(KeyError), use_polyattn(model):
            raise KeyError
        assert state(model) == before
        assert torch.nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention

    @BOTH_KINDS
    def test_another_model_attends_as_before_even_if_it_shares_the_processor(self, case):
        ours, other = case.build(), case.build()
        shared = processors(ours)[0]
        for model in (ours, other):
            for module in model.modules():
                if hasattr(module, "processor"):
                    module.processor = shared
        with use_polyattn(ours):
            assert calls(ours, case) > 0
            assert calls(other, case) == 0
        assert processors(ours) == processors(other)

    def test_the_default_of_the_process_stays(self):
        model = WAN.build()
        before = dispatcher._AttentionBackendRegistry._active_backend
        with use_polyattn(model):
            assert dispatcher._AttentionBackendRegistry._active_backend is before
            q = torch.randn(1, 4, 2, 8)
            with pa.record_routes() as log:
                dispatcher.dispatch_attention_fn(q, q, q)
            assert log.entries == []

    def test_a_choice_of_diffusers_backend_made_before_is_there_again(self):
        model = WAN.build()
        model.blocks[0].attn1.processor._attention_backend = "_native_math"
        with use_polyattn(model):
            assert calls(model, WAN) == 4
        assert model.blocks[0].attn1.processor._attention_backend == "_native_math"
        assert calls(model, WAN) == 0

    def test_scopes_nest_and_take_several_models(self):
        one, two = WAN.build(), SD3.build()
        with use_polyattn(one):
            with use_polyattn(one, two):
                assert (calls(one, WAN), calls(two, SD3)) == (4, 3)
            assert (calls(one, WAN), calls(two, SD3)) == (4, 0)
        assert calls(one, WAN) == 0

    @BOTH_KINDS
    def test_scopes_of_several_threads_end_in_any_order(self, case):
        model = case.build()
        before = state(model)
        first, second, third = (use_polyattn(model) for _ in range(3))
        for scope in (first, second, third):
            scope.__enter__()
        for scope in (second, first):
            scope.__exit__(None, None, None)
            assert calls(model, case) == len(before)
        third.__exit__(None, None, None)
        assert state(model) == before
        assert calls(model, case) == 0

    def test_a_model_given_twice_is_put_back(self):
        model = WAN.build()
        before = state(model)
        with use_polyattn(model, model.blocks[0], model):
            assert calls(model, WAN) == len(before)
        assert state(model) == before

    @BOTH_KINDS
    @pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_model_copied_or_pickled_meanwhile_attends_as_it_did_before(self, case, again):
        model = case.build()
        before = state(model)
        with use_polyattn(model):
            with use_polyattn(model):
                other = again(model)
            assert (calls(model, case), calls(other, case)) == (len(before), 0)
        assert [(kind, own) for _, kind, own in state(other)] == [(kind, own) for _, kind, own in before]
        assert state(model) == before

    def test_a_processor_that_the_user_sets_meanwhile_stays(self):
        model = SD3.build()
        mine = JointAttnProcessor2_0()
        with use_polyattn(model):
            model.set_attn_processor(mine)
        assert all(processor is mine for processor in processors(model))

    def test_a_backend_is_chosen_as_anywhere(self):
        model = WAN.build()
        with torch.no_grad(), use_polyattn(model), pa.use_backend("blocked"), pa.record_routes() as log:
            model(**WAN.arguments(False))
        assert {entry.route for entry in log.entries} == {"cpu:blocked"}


class TestProcessors:
    def test_a_stand_in_is_an_instance_of_the_class_with_its_signature(self):
        model = SD3.build()
        original = processors(model)[0]
        with use_polyattn(model):
            ours = processors(model)[0]
            assert isinstance(ours, JointAttnProcessor2_0)
            assert type(ours).__name__ == "JointAttnProcessor2_0"
            assert inspect.signature(ours.__call__) == inspect.signature(original.__call__)

    def test_parameters_of_a_processor_are_still_the_models(self):
        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.by = torch.nn.Parameter(torch.ones(()))
                self.inner = AttnProcessor2_0()

            def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
                q = attn.to_q(hidden_states) * self.by
                q, k, v = (t.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for t in (q, q, q))
                return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        attention = diffusers.models.attention_processor.Attention(8, heads=2, dim_head=4, processor=Scaled())
        names = list(attention.state_dict())
        with use_polyattn(attention) as routed, pa.record_routes() as log:
            assert list(attention.state_dict()) == names
            attention(torch.randn(1, 3, 8)).sum().backward()
        assert routed.patched == ("Attention: Scaled",)
        assert len(log.entries) == 1
        assert attention.processor.by.grad is not None

    def test_what_cannot_be_routed_is_listed(self):
        with use_polyattn(SANA.build()) as routed:
            assert routed.left == ("transformer_blocks.0.attn1: SanaLinearAttnProcessor2_0",)
            assert routed.patched == ("transformer_blocks.0.attn2: SanaAttnProcessor2_0",)

    def test_a_model_of_which_nothing_can_be_routed_is_refused_with_what_it_has(self):
        model = UNET.build()
        model.set_attn_processor(AttnProcessor())
        with pytest.raises(ValueError, match="UNet2DConditionModel.*AttnProcessor"), use_polyattn(model):
            pass
        with pytest.raises(ValueError, match="Linear.*no processor"), use_polyattn(torch.nn.Linear(2, 2)):
            pass

    def test_a_pipeline_is_not_a_model(self):
        with pytest.raises(TypeError, match=r"pipe\.transformer"), use_polyattn(object()):
            pass
