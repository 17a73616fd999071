"""Launches of remembered code are the ones that Triton itself would make, whatever the arguments are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.kernels import launch as launching
from polyattn.kernels.launch import launch, launch_prepared, prepare
from tests.kernels.fill import (
    VARIATIONS,
    arguments,
    by_triton,
    by_us,
    counted,
    fill_kernel,
    launched_on,
    split,
    variations,
)
from tests.kernels.launches import watched

#: Triton itself is what is tested here: without a GPU, it compiles, and a stand-in of its driver launches nothing.
INTERPRETED = False
VERIFIED = launching._VERIFIED


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, str]]:
    with launched_on(monkeypatch) as found:
        yield found


def test_every_launch_is_the_one_that_triton_makes(place: tuple[torch.device, str]) -> None:
    """In two orders, so that each launch finds what others have left behind; twice, so that it finds its own."""
    device, where = place
    ways = {name: arguments(where, **changed) for name, changed in variations(where).items()}
    with watched() as seen:
        for name in [*VARIATIONS, *reversed(VARIATIONS)]:
            given = ways[name]
            positional = [value for name, value in given.items() if name not in ("BLOCK", "ADD")]
            constants = {name: given[name] for name in ("BLOCK", "ADD") if name in given}
            by_triton(device, positional, constants)
            by_us(device, positional, constants)
            by_us(device, positional, constants)
            expected, first, second = seen
            assert first[:3] + first[4:] == expected[:3] + expected[4:], name
            assert second[:3] + second[4:] == expected[:3] + expected[4:], name
            seen.clear()


def test_results_are_those_of_the_kernel(place: tuple[torch.device, str]) -> None:
    device, where = place
    if where == "cpu":
        pytest.skip("no GPU that would compute them: torch.cuda.is_available() is False")
    misaligned = torch.arange(65.0, device=where)[1:]
    for changed in ({}, {"given": misaligned}, {"step": 1}, {"flag": True}, {"far": 2**33}):  # type: dict[str, Any]
        mine, own = (arguments(where, **changed) for _ in range(2))
        for _ in range(2):
            by_us(device, *split(mine))
        by_triton(device, *split(own))
        assert torch.equal(mine["out"], own["out"])
        assert mine["out"].any()


def test_a_remembered_launch_does_not_ask_triton(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    positional, constants = split(arguments(where))
    with watched() as seen:
        by_us(device, positional, constants)
        monkeypatch.setattr(type(fill_kernel), "run", None)
        by_us(device, positional, constants)
        launch(fill_kernel, (5,), device, *positional, **constants)
    assert [launched.grid for launched in seen] == [(3, 2, 1), (3, 2, 1), (5, 1, 1)]
    assert seen[1].hooks == (None, None)


@pytest.mark.parametrize("version", ["3.3.1", "3.5.1", "3.7.0", "3.8.0", "3.10.0", "4.0.0"])
def test_triton_does_it_where_its_version_is_not_known(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    device, where = place
    monkeypatch.setattr(launching, "_VERIFIED", VERIFIED)
    monkeypatch.setattr(triton, "__version__", version)
    launching._direct.cache_clear()
    asked = counted(monkeypatch)
    with watched() as seen:
        for _ in range(3):
            by_us(device, *split(arguments(where)))
    assert len(asked) == len(seen) == 3
    launching._direct.cache_clear()


def test_triton_does_it_where_its_backend_is_not_known(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    monkeypatch.setattr(launching, "_VERIFIED", {("another", launching._version())})
    launching._direct.cache_clear()
    asked = counted(monkeypatch)
    with watched() as seen:
        for _ in range(3):
            by_us(device, *split(arguments(where)))
    assert len(asked) == len(seen) == 3
    launching._direct.cache_clear()


def test_triton_does_it_for_arguments_that_we_do_not_know(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    given = arguments(where)
    given["given"] = triton.reinterpret(given["given"], torch.int32)
    asked = counted(monkeypatch)
    with watched() as seen:
        for _ in range(2):
            by_us(device, *split(given))
    assert len(asked) == len(seen) == 2


def test_hooks_of_triton_are_called(place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch) -> None:
    device, where = place
    told: list[Any] = []
    with watched() as seen:
        by_us(device, *split(arguments(where)))
        if isinstance(getattr(triton.knobs.runtime.launch_enter_hook, "calls", None), list):
            monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [told.append])
        else:
            monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", told.append)
        by_us(device, *split(arguments(where)))
    assert seen[1].hooks[0] is triton.knobs.runtime.launch_enter_hook


def test_another_device_is_another_launch(place: tuple[torch.device, str]) -> None:
    device, where = place
    if where != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    other = torch.device("cuda", 1)
    with watched() as seen:
        for on in (device, other, device, other):
            home = where if where == "cpu" else str(on)
            launch(fill_kernel, (1,), on, *split(arguments(home))[0], BLOCK=32)
    assert seen[0].code == seen[2].code
    assert seen[1].code == seen[3].code
    assert seen[0].code != seen[1].code
    assert seen[0].stream == seen[2].stream


def test_what_is_remembered_is_bounded(place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch) -> None:
    device, where = place
    monkeypatch.setattr(launching, "_MOST_VARIANTS", 2)
    monkeypatch.setattr(launching, "_MOST_KINDS", 1)
    monkeypatch.setattr(launching, "_MOST_COMPILED", 1)
    changes: tuple[dict[str, Any], ...] = ({}, {"step": 1}, {"flag": 1})
    with watched():
        for block in (16, 32, 64):
            for changed in changes:
                by_us(device, *split(arguments(where, BLOCK=block, **changed)))
    assert len(launching._variants) <= 2
    for variant in launching._variants.values():
        assert len(variant.kinds) == 1
        assert all(len(kind.compiled) == 1 for kind in variant.kinds.values())


def test_fake_tensors_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    with FakeTensorMode():
        fake = torch.empty(64, device="cuda")
    for tensor in (fake, torch.empty(64, device="meta")):
        launch(fill_kernel, (1,), tensor.device, tensor, tensor, tensor, None, 1, 1, 1, 1.0, False, BLOCK=32)
        ready = prepare(fill_kernel, 1, 1, 1, 1.0, False, BLOCK=32)
        launch_prepared(ready, (1,), tensor.device, tensor, tensor, tensor, None)
    assert not asked
