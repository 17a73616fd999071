"""Launches of remembered code are the ones that Triton itself would make, whatever the arguments are."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.kernels import launch as launching
from polyattn.kernels.launch import launch, launch_prepared, launch_repeated, prepare, repeat
from tests.kernels.launches import absent_gpus, watched

#: Triton itself is what is tested here: without a GPU, it compiles, and a stand-in of its driver launches nothing.
INTERPRETED = False
VERIFIED = launching._VERIFIED


@triton.jit(do_not_specialize=("rows", "far"), do_not_specialize_on_alignment=("loose",))
def fill_kernel(out, given, loose, absent, rows, far, step, weight, flag, BLOCK: tl.constexpr, ADD: tl.constexpr = 0):
    """out[i * step] = given[i] + loose[0] + what the numbers are, for i < rows."""
    at = tl.arange(0, BLOCK)
    more = weight + far.to(tl.float32) + ADD
    if absent is not None:
        more += tl.load(absent)
    if flag:
        more += 1.0
    values = tl.load(given + at, mask=at < rows, other=0.0).to(tl.float32) + tl.load(loose).to(tl.float32) + more
    tl.store(out + at * step, values, mask=at < rows)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, str]]:
    """The device that is launched on, and where tensors are: the GPU, or the CPU for one that is not there.

    The present version of Triton is taken for a verified one: whether it is one, these tests say.
    """
    monkeypatch.setattr(launching, "_VERIFIED", {("cuda", launching._version())})
    monkeypatch.setattr(launching, "_variants", {})
    fill_kernel.device_caches.clear()
    launching._direct.cache_clear()
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device()), "cuda"
        launching._direct.cache_clear()
        return
    with absent_gpus() as module:
        monkeypatch.setattr(launching, "_module", lambda kind: module)
        yield torch.device("cuda", 0), "cpu"
        fill_kernel.device_caches.clear()
        monkeypatch.undo()
        gc.collect()  # code that is let go of is unloaded by the driver that loaded it
    launching._direct.cache_clear()


def arguments(where: str, **changed: Any) -> dict[str, Any]:
    """What the kernel is launched with, in its order, constants last."""
    given = {
        "out": torch.zeros(256, device=where), "given": torch.arange(64.0, device=where),
        "loose": torch.ones(8, device=where), "absent": None, "rows": 20, "far": 3, "step": 2, "weight": 0.5,
        "flag": False, "BLOCK": 32,
    }  # fmt: skip
    return given | changed


def variations(where: str) -> dict[str, dict[str, Any]]:
    """Every way in which arguments differ for Triton, and ways in which they do not."""
    shifted = torch.arange(65.0, device=where)
    return {
        "as it is": {},
        "misaligned": {"given": shifted[1:]},
        "aligned in the middle": {"given": shifted[4:]},
        "output misaligned": {"out": torch.zeros(257, device=where)[1:]},
        "misaligned where it does not count": {"loose": torch.ones(9, device=where)[1:]},
        "another dtype": {"given": torch.arange(64, device=where, dtype=torch.float16)},
        "another dtype where alignment does not count": {"loose": torch.ones(8, device=where, dtype=torch.float64)},
        "parameter": {"given": torch.nn.Parameter(torch.arange(64.0, device=where))},
        "nothing there": {"given": torch.empty(0, device=where), "rows": 0},
        "present": {"absent": torch.ones(1, device=where)},
        "step 1": {"step": 1},
        "step 16": {"step": 16, "rows": 16},
        "step 48": {"step": 48, "rows": 4},
        "step 0": {"step": 0},
        "step 3": {"step": 3},
        "step of 64 bits": {"step": 2**40, "rows": 1},
        "step of 64 bits that 16 does not divide": {"step": 2**40 + 1, "rows": 1},
        "negative step": {"step": -(2**31) - 1, "rows": 1},
        "other rows": {"rows": 21},
        "rows 1": {"rows": 1},
        "rows 16": {"rows": 16},
        "far, 32 bits": {"far": 2**31 - 1},
        "far, 64 bits": {"far": 2**31},
        "far below, 32 bits": {"far": -(2**31)},
        "far below, 64 bits": {"far": -(2**31) - 1},
        "far, unsigned": {"far": 2**63},
        "far, the last of 64 bits": {"far": 2**63 - 1},
        "weight": {"weight": 2.0},
        "weight that is whole": {"weight": 2},
        "flag": {"flag": True},
        "flag that is a number": {"flag": 1},
        "another constant": {"BLOCK": 64},
        "a default constant": {"ADD": 2},
        "a constant that equals another": {"ADD": True},
    }


VARIATIONS = tuple(variations("cpu"))


def by_us(device: torch.device, given: list[Any], constants: dict[str, Any]) -> None:
    launch(fill_kernel, (3, 2), device, *given, **constants)


def by_triton(device: torch.device, given: list[Any], constants: dict[str, Any]) -> None:
    fill_kernel[(3, 2)](*given, enable_fp_fusion=True, **constants)


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
            by_us(device, *_split(mine))
        by_triton(device, *_split(own))
        assert torch.equal(mine["out"], own["out"])
        assert mine["out"].any()


def _split(given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    constants = {name: given[name] for name in ("BLOCK", "ADD") if name in given}
    return [value for name, value in given.items() if name not in constants], constants


def test_a_remembered_launch_does_not_ask_triton(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    positional, constants = _split(arguments(where))
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
    asked = _counted(monkeypatch)
    with watched() as seen:
        for _ in range(3):
            by_us(device, *_split(arguments(where)))
    assert len(asked) == len(seen) == 3
    launching._direct.cache_clear()


def test_triton_does_it_where_its_backend_is_not_known(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    monkeypatch.setattr(launching, "_VERIFIED", {("another", launching._version())})
    launching._direct.cache_clear()
    asked = _counted(monkeypatch)
    with watched() as seen:
        for _ in range(3):
            by_us(device, *_split(arguments(where)))
    assert len(asked) == len(seen) == 3
    launching._direct.cache_clear()


def test_triton_does_it_for_arguments_that_we_do_not_know(
    place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, where = place
    given = arguments(where)
    given["given"] = triton.reinterpret(given["given"], torch.int32)
    asked = _counted(monkeypatch)
    with watched() as seen:
        for _ in range(2):
            by_us(device, *_split(given))
    assert len(asked) == len(seen) == 2


def test_hooks_of_triton_are_called(place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch) -> None:
    device, where = place
    told: list[Any] = []
    with watched() as seen:
        by_us(device, *_split(arguments(where)))
        if isinstance(getattr(triton.knobs.runtime.launch_enter_hook, "calls", None), list):
            monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [told.append])
        else:
            monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", told.append)
        by_us(device, *_split(arguments(where)))
    assert seen[1].hooks[0] is triton.knobs.runtime.launch_enter_hook


def test_another_device_is_another_launch(place: tuple[torch.device, str]) -> None:
    device, where = place
    if where != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    other = torch.device("cuda", 1)
    with watched() as seen:
        for on in (device, other, device, other):
            home = where if where == "cpu" else str(on)
            launch(fill_kernel, (1,), on, *_split(arguments(home))[0], BLOCK=32)
    assert seen[0].code == seen[2].code
    assert seen[1].code == seen[3].code
    assert seen[0].code != seen[1].code
    assert seen[0].stream == seen[2].stream


def test_prepared_kernels_launch_as_triton_does(place: tuple[torch.device, str]) -> None:
    device, where = place
    for changed in variations(where).values():
        positional, constants = _split(arguments(where, **changed))
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
    positional, constants = _split(arguments(where, rows=0))
    ready = prepare(fill_kernel, *positional[4:], **constants)
    ways = [_split(arguments(where, **changed))[0][:4] for changed in variations(where).values()]
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
    positional, constants = _split(arguments(where))
    again = repeat(prepare(fill_kernel, *positional[4:], **constants), (3, 2), device, absent=1)
    shifted = torch.arange(65.0, device=where)[1:]
    ways = [positional[:3], [positional[0], shifted, positional[2]]]
    asked = _counted(monkeypatch)
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
    positional, constants = _split(arguments(where))
    again = repeat(prepare(fill_kernel, *positional[4:], **constants), (1,), device, absent=1)
    asked = _counted(monkeypatch)
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
            positional, constants = _split(arguments(home))
            ready = prepare(fill_kernel, *positional[4:], **constants)
            again = repeat(ready, (1,), on, absent=1)
            for _ in range(2):
                launch_repeated(again, *positional[:3])
    assert seen[0].code == seen[1].code
    assert seen[2].code == seen[3].code
    assert seen[0].code != seen[2].code


def test_what_is_remembered_is_bounded(place: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch) -> None:
    device, where = place
    monkeypatch.setattr(launching, "_MOST_VARIANTS", 2)
    monkeypatch.setattr(launching, "_MOST_KINDS", 1)
    monkeypatch.setattr(launching, "_MOST_COMPILED", 1)
    changes: tuple[dict[str, Any], ...] = ({}, {"step": 1}, {"flag": 1})
    with watched():
        for block in (16, 32, 64):
            for changed in changes:
                by_us(device, *_split(arguments(where, BLOCK=block, **changed)))
    assert len(launching._variants) <= 2
    for variant in launching._variants.values():
        assert len(variant.kinds) == 1
        assert all(len(kind.compiled) == 1 for kind in variant.kinds.values())


def test_fake_tensors_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _counted(monkeypatch)
    with FakeTensorMode():
        fake = torch.empty(64, device="cuda")
    for tensor in (fake, torch.empty(64, device="meta")):
        launch(fill_kernel, (1,), tensor.device, tensor, tensor, tensor, None, 1, 1, 1, 1.0, False, BLOCK=32)
        ready = prepare(fill_kernel, 1, 1, 1, 1.0, False, BLOCK=32)
        launch_prepared(ready, (1,), tensor.device, tensor, tensor, tensor, None)
    assert not asked


def test_tensors_are_no_constants() -> None:
    with pytest.raises(TypeError, match="by position"):
        prepare(fill_kernel, loose=torch.ones(1))


def _counted(patch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that Triton itself is asked to launch."""
    asked: list[int] = []
    real = type(fill_kernel).run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(1)
        return real(self, *args, **options)

    patch.setattr(type(fill_kernel), "run", run)
    return asked
