"""torch made to look like the build that serves one vendor, and a machine made to look like nobody's."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

#: What each build of torch says of itself: versions, and the devices that a plugin adds.
BUILDS: dict[str, dict[str, str]] = {
    "rocm": {"hip": "7.0.0"},
    "cuda": {"cuda": "12.8"},
    "xpu": {"xpu": "20250301"},
    "npu": {"npu": "plugin"},
    "musa": {"musa": "plugin"},
    "cpu": {},
}


def detection_of(vendor: str) -> ModuleType:
    """The module that detects this vendor."""
    return import_module(f"polyattn_{vendor}.detection")


def no_devices(monkeypatch: pytest.MonkeyPatch, detection: ModuleType) -> None:
    """No driver and no vendor variable, whatever machine this is."""
    monkeypatch.setattr(detection, "DRIVER_FILES", ())
    for variable in detection.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, build: str, devices: int = 8, **answers: Any) -> None:
    """Make torch look like that build, with so many devices; `answers` are attributes of its device module."""
    says = BUILDS[build]
    for version in ("hip", "cuda", "xpu"):
        monkeypatch.setattr(torch.version, version, says.get(version), raising=False)
    given = {"is_available": lambda: True, "is_initialized": lambda: False, "device_count": lambda: devices, **answers}
    for plugin in ("npu", "musa"):
        if plugin in says:
            monkeypatch.setattr(torch, plugin, SimpleNamespace(**given), raising=False)
        else:
            monkeypatch.delattr(torch, plugin, raising=False)
    for module in (torch.cuda, torch.xpu):
        for name, answer in given.items():
            monkeypatch.setattr(module, name, answer, raising=False)


def forbidden(*_: object, **__: object) -> None:
    """Stands where an answer would make a device context, or start the runtime in this process."""
    raise AssertionError("this makes a device context, or starts the runtime in this process")
