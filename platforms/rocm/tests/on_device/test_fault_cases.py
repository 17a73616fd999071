"""Public fault reports of wrong values, on the device, through every backend: the emulator tests' own scenes."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from platforms.rocm.tests import test_fault_cases as scenes
from platforms.rocm.tests.emulated import BACKENDS, scenes_of

pytestmark = pytest.mark.rocm

PORTABLE = ("triton", "flex", "sdpa", "blocked")
#: What is said there of head dims, and of quantisation by name, is true of the makers' packages.
OF_PACKAGES = ("scene_35_", "scene_40_")


@pytest.mark.parametrize("scene", scenes_of(vars(scenes)))
@pytest.mark.parametrize("backend", [*BACKENDS, *PORTABLE])
def test_fault_case(backend: str, scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend in PORTABLE and scene.startswith(OF_PACKAGES):
        pytest.skip(f"{scene} is about the makers' packages")
    monkeypatch.setattr(scenes, "HERE", torch.device("cuda"))
    try:
        getattr(scenes, scene)(backend)
    except pa.BackendUnavailable as absent:
        pytest.skip(str(absent))
