"""Prepared and repeated launches are the ones that Triton itself would make, and ask it only where they must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polyattn.kernels import launch as launching
from polyattn.kernels.launch import launch_prepared, launch_repeated, prepare, repeat
from tests.kernels.fill import arguments, by_triton, counted, fill_kernel, launched_on, split, variations
from tests.kernels.launches import watched

#: Triton itself is what is tested here: without a GPU, it compiles, and a stand-in of its driver launches nothing.
INTERPRETED = False


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, str]]:
    with launched_on(monkeypatch) as found:
        yield found


def test_prepared_kernels_launch_as_triton_does(place: tuple[torch.device, str]) -> None:
    device, where = place
    for changed in variations(where).values():
        positional, constants = split(arguments(where, **changed))
        ready = prepare(fill_kernel, *positional[4:], **constants)
        with watched() as seen:
            fill_kernel.device_caches.clear()
            launching._variants.clear()
            by_triton(device, positional, constants)
            for _ in range(2):
                launch_prepared(ready, (3, 2), device, *positional[:4])
            assert [launched[:3] + launched[4:] for launched in seen] == [seen[0][:3] + seen[0][4:]] * 3


def test_prepared_kernels_look_at_the_tensors(place: tuple[torch.device, str]) -> None:
    """Without a row, as the number of rows is prepared, and one of the tensors holds nothing."""
    device, where = place
    positional, constants = split(arguments(where, rows=0))
    ready = prepare(fill_kernel, *positional[4:], **constants)
    ways = [split(arguments(where, **changed))[0][:4] for changed in variations(where).values()]
    with watched() as seen:
        for tensors in (*ways, *reversed(ways)):
            fill_kernel[(3, 2)](*tensors, *positional[4:], enable_fp_fusion=True, **constants)
            launch_prepared(ready, (3, 2), device, *tensors)
            assert seen[-2][:3] + seen[-2][4:] == seen[-1][:3] + seen[-1][4:]


def test_repeated_launches_look_at_the_addresses(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned, misaligned, and aligned again, each as Triton launches it; only a first one of a kind asks Triton."""
    device, where = place
    positional, constants = split(arguments(where))
    again = repeat(prepare(fill_kernel, *positional[4:], **constants), (3, 2), device, absent=1)
    shifted = torch.arange(65.0, device=where)[1:]
    ways = [positional[:3], [positional[0], shifted, positional[2]]]
    asked = counted(monkeypatch)
    with watched() as seen:
        for tensors in (*ways, *ways, ways[1], ways[0]):
            fill_kernel[(3, 2)](*tensors, *positional[3:], enable_fp_fusion=True, **constants)
            launch_repeated(again, *tensors)
            assert seen[-2][:3] + seen[-2][4:] == seen[-1][:3] + seen[-1][4:]
    assert len(asked) == 6 + 2


def test_repeated_launches_ask_triton_where_somebody_watches(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    positional, constants = split(arguments(where))
    again = repeat(prepare(fill_kernel, *positional[4:], **constants), (1,), device, absent=1)
    asked = counted(monkeypatch)
    with watched():
        for _ in range(2):
            launch_repeated(again, *positional[:3])
        assert len(asked) == 1
        monkeypatch.setattr(fill_kernel, "pre_run_hooks", [lambda *args, **options: None])
        launch_repeated(again, *positional[:3])
    assert len(asked) == 2


def test_repeated_launches_run_on_the_device_that_was_named(place: tuple[torch.device, str]) -> None:
    device, where = place
    if where != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    other = torch.device("cuda", 1)
    with watched() as seen:
        for on in (device, other):
            home = where if where == "cpu" else str(on)
            positional, constants = split(arguments(home))
            ready = prepare(fill_kernel, *positional[4:], **constants)
            again = repeat(ready, (1,), on, absent=1)
            for _ in range(2):
                launch_repeated(again, *positional[:3])
    assert seen[0].code == seen[1].code
    assert seen[2].code == seen[3].code
    assert seen[0].code != seen[2].code


def test_tensors_are_no_constants() -> None:
    with pytest.raises(TypeError, match="by position"):
        prepare(fill_kernel, loose=torch.ones(1))
