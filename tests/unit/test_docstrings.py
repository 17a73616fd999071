"""The examples in the docstrings run; every public name has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import polyattn as pa

_OPTIONAL = ("polyattn.integrations.", "polyattn.testing.", "polyattn.__main__", "polyattn.triton")
MODULES = sorted(
    info.name for info in pkgutil.walk_packages(pa.__path__, "polyattn.") if not info.name.startswith(_OPTIONAL)
)
ROOMS = {"distributed", "graphs", "integrations", "structures", "testing", "vendor"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    torch.manual_seed(0)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.parametrize("name", sorted(set(pa.__all__) - ROOMS))
def test_every_public_name_has_an_example(name: str) -> None:
    value = getattr(pa, name)
    text = (type(value) if name == "current_platform" else value).__doc__
    assert text is not None
    assert ">>>" in text


def test_the_public_names_are_one_list() -> None:
    assert set(pa.__all__) == {*pa._HOME, *pa._ROOMS}
    assert set(pa.__all__) <= set(dir(pa))
