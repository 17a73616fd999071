"""What a device may have around a call, acted out on the CPU: graphs, streams, a mode that refuses waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import polyattn as pa
from polyattn import plan
from polyattn.testing import captured, streams
from polyattn.testing.running import Answer
from polyattn.testing.targets import Target, targets
from polyattn.vendor import Backend
from tests.conformance import surrounded_slots


@contextmanager
def staged(backend: Backend) -> Iterator[Target]:
    """This backend on a CPU that has it all.

    A graph holds the call, and its replay makes it again into the same memory; the platform says that it is capturing
    while one is recorded. `surrounded_slots.sync_mode` is what the device does where the host waits.
    """
    recording: list[bool] = []

    def record(device: torch.device, call: Callable[[], Answer]) -> tuple[Answer, Callable[[], None]]:
        recording.append(True)
        try:
            answer = call()
        finally:
            recording.clear()

        def replay() -> None:
            again = call()
            answer.out.copy_(again.out)
            if answer.lse is not None and again.lse is not None:
                answer.lse.copy_(again.lse)

        return answer, replay

    (target,) = targets(None, "cpu:blocked")
    platform = replace(target.platform, backends=(backend,), capturing=lambda: bool(recording))
    pa.reload_environment()  # no plan of another stage
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plan._owners, "cpu", platform)
        for module in ("plan", "explanation"):
            patch.setattr(f"polyattn.{module}.backends_of", lambda platform: platform.backends)
        patch.setattr(captured, "record", record)
        patch.setattr(torch.cpu, "get_sync_debug_mode", lambda: surrounded_slots.sync_mode, raising=False)
        patch.setattr(
            torch.cpu, "set_sync_debug_mode", lambda mode: setattr(surrounded_slots, "sync_mode", mode), raising=False
        )
        patch.setattr(streams, "_BUSY", 8)
        patch.setattr(Target, "surrounds", lambda self, within: True)
        yield Target(platform, backend)
    pa.reload_environment()
