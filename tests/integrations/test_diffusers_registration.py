"""The name "polyattn" in diffusers' dispatcher: added once, taken by diffusers' own calls, and taken away entirely."""

from __future__ import annotations

import pickle
from enum import Enum

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch as dispatcher

import polyattn as pa
from polyattn.integrations import diffusers as bridge
from tests.integrations.diffusers_video_models import VIDEO_MODELS

WAN = VIDEO_MODELS[0]
NAMES, REGISTRY = dispatcher.AttentionBackendName, dispatcher._AttentionBackendRegistry


@pytest.fixture(autouse=True)
def _as_it_was():
    """Each test starts and ends without the name, and with the default that diffusers had."""
    active = REGISTRY._active_backend
    bridge.uninstall()
    yield
    REGISTRY.set_active_backend(active)
    bridge.uninstall()


def known():
    """All that the dispatcher knows of names."""
    return [
        list(NAMES), dict(NAMES.__members__), list(NAMES._value2member_map_), list(REGISTRY._backends),
        list(REGISTRY._constraints), list(REGISTRY._supported_arg_names), REGISTRY._active_backend,
    ]  # fmt: skip


def routes_of(model):
    with torch.no_grad(), pa.record_routes() as log:
        model(**WAN.arguments(False))
    return sum(entry.count for entry in log.entries)


class TestInstall:
    def test_the_name_is_a_member_like_any_other(self):
        assert bridge.install() == bridge.install() == "polyattn"
        member = NAMES("polyattn")
        assert isinstance(member, NAMES)
        assert (member.name, member.value, member) == ("polyattn", "polyattn", "polyattn")
        assert list(NAMES).count(member) == 1
        assert pickle.loads(pickle.dumps(member)) is member
        assert REGISTRY._backends[member] is bridge.attention

    def test_uninstall_leaves_no_trace(self):
        before = known()
        bridge.install()
        assert known() != before
        bridge.uninstall()
        assert known() == before
        bridge.uninstall()
        assert known() == before

    def test_uninstall_does_not_leave_the_process_with_a_default_that_is_gone(self):
        bridge.install()
        REGISTRY.set_active_backend(NAMES("polyattn"))
        bridge.uninstall()
        assert REGISTRY._active_backend is NAMES.NATIVE

    def test_a_name_that_is_somebody_elses_is_left_alone(self):
        bridge.install()
        REGISTRY._backends[NAMES("polyattn")] = print
        with pytest.raises(ValueError, match="polyattn"):
            bridge.install()
        bridge.uninstall()
        assert REGISTRY._backends.pop(NAMES("polyattn")) is print
        REGISTRY._backends[NAMES("polyattn")] = bridge.attention

    @pytest.mark.parametrize("gone", ["AttentionBackendName", "_AttentionBackendRegistry"])
    def test_a_diffusers_without_this_dispatcher_is_refused_with_its_version(self, gone, monkeypatch):
        monkeypatch.delattr(dispatcher, gone)
        with pytest.raises(pa.BackendUnavailable, match=diffusers.__version__):
            bridge.install()
        monkeypatch.undo()

    def test_a_dispatcher_whose_names_are_others_is_refused_with_its_version(self, monkeypatch):
        monkeypatch.setattr(dispatcher, "AttentionBackendName", Enum("Names", ["DEFAULT"]))
        with pytest.raises(pa.BackendUnavailable, match=diffusers.__version__):
            bridge.install()
        monkeypatch.undo()


class TestDiffusersOwnCalls:
    def test_set_attention_backend_takes_the_name_and_reset_takes_it_away(self):
        model = WAN.build()
        bridge.install()
        model.set_attention_backend("polyattn")
        assert routes_of(model) == 4
        REGISTRY.set_active_backend(NAMES.NATIVE)  # which set_attention_backend changes for the whole process
        assert routes_of(model) == 4
        model.reset_attention_backend()
        assert routes_of(model) == 0

    def test_the_context_manager_takes_the_name(self):
        model = WAN.build()
        bridge.install()
        with diffusers.attention_backend("polyattn"):
            assert routes_of(model) == 4
        assert routes_of(model) == 0

    def test_an_unknown_name_is_still_refused(self):
        with pytest.raises(ValueError, match="polyattn"):
            WAN.build().set_attention_backend("polyattn")

    def test_the_optional_checks_of_the_dispatcher_find_nothing_to_say(self, monkeypatch, caplog):
        bridge.install()
        monkeypatch.setattr(REGISTRY, "_checks_enabled", True)
        q = torch.randn(1, 4, 2, 8)
        monkeypatch.setattr(dispatcher.logger, "propagate", True)
        dispatcher.dispatch_attention_fn(q, q, q, backend="polyattn")
        assert caplog.records == []
