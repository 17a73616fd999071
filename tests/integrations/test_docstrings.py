"""The examples in the bridges' docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

from polyattn import integrations

MODULES = sorted(info.name for info in pkgutil.iter_modules(integrations.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(f"{integrations.__name__}.{name}")
    results = doctest.testmod(module, globs={"__name__": "example"})  # a user's code, and not polyattn's own
    assert results.failed == 0
    assert results.attempted > 0 or name not in ("diffusers", "patching", "transformers")
