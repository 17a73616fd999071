"""The kernels that a call launches, from a profiler's trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_LAUNCHED = ("kernel", "gpu_memcpy", "gpu_memset")


def launched(call: Callable[[], Any], device: torch.device) -> list[str] | None:
    """Names in order of start; None on a device that has no kernels."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    activities = list(torch.profiler.supported_activities())
    call()
    module.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        module.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ran = [event for event in events if event.get("cat") in _LAUNCHED]
    return [event["name"] for event in sorted(ran, key=lambda event: event["ts"])]
