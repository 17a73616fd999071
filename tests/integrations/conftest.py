"""Fixtures of the transformers bridge: registered, seeded, and what it makes of each call."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def installed():
    """The bridge, registered, before a seeded test."""
    from polyattn.integrations import transformers as bridge

    torch.manual_seed(0)
    bridge.install()
    return bridge


@pytest.fixture
def calls(installed, monkeypatch):
    """Every `Call` that the attention function makes of its arguments, in order."""
    seen = []
    translate = installed.translate

    def spy(*arguments):
        seen.append(translate(*arguments))
        return seen[-1]

    monkeypatch.setattr(installed, "translate", spy)
    return seen
