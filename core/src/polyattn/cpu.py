"""The CPU platform: always present, found through an entry point like any vendor's."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Sequence

from polyattn.vendor import Found, Machine, Platform, Request


def platform() -> Platform:
    """The entry point's answer."""
    return Platform(
        name="cpu",
        device_type="cpu",
        priority=0,
        probe=lambda: Found(f"{os.cpu_count()} cores, {host.machine()}"),
        machine=machine,
        backends="polyattn.backends.cpu:BACKENDS",
        order=order,
        collective_backend="gloo",
    )


def machine(device: str) -> Machine:
    """Facts of this host; imports torch."""
    import torch

    return Machine(
        platform="cpu",
        device_type="cpu",
        arch=host.machine(),
        name=torch.backends.cpu.get_cpu_capability(),
        versions={"torch": torch.__version__},
        build_facts={"threads": torch.get_num_threads()},
    )


def order(request: Request, machine: Machine) -> Sequence[str]:
    """SDPA's flash kernel first; the blocked composition serves what it cannot."""
    return ("sdpa", "blocked")
