"""A second call, on a device that raises where the host would wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from polyattn.testing.asking import Asked
from polyattn.testing.running import Trial, run
from polyattn.testing.targets import Target


def second_call(asked: Asked, target: Target) -> Iterator[Trial]:
    """The first call may send and read what it needs; the second may not wait for anything."""
    module: Any = torch.get_device_module(target.device)
    run(asked)
    before = module.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        module.set_sync_debug_mode("error")
        try:
            answer = run(asked)
        finally:
            module.set_sync_debug_mode(before)
    yield Trial(asked, answer)
