"""A vendor's backend as the CPU's, where its emulated operators run: `cpu:xpu_sdpa` has the slots of `xpu:sdpa`.

Its check is asked about the device passed for in the place of the CPU, and what it requires is taken as installed.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

from polyattn.vendor import Backend, Machine, Request


def backend_on_cpu(name: str, known: Machine) -> Backend:
    """The backend of that name of the platform of `known`, the machine passed for; LookupError where there is none."""
    platform = known.platform
    found = {one.name: one for one in importlib.import_module(f"polyattn_{platform}.backends").BACKENDS}
    if name not in found:
        raise LookupError(f"{platform}:{name}: no such backend here; there are {', '.join(found)}")
    if missing := [need.package for need in found[name].requires if need.package not in known.versions]:
        raise LookupError(f"{name} requires {', '.join(missing)}, which its emulators do not pass for")
    return replace(
        found[name], name=f"{platform}_{name}", requires=(), check=partial(_check, found[name], known)
    )  # fmt: skip


def _check(backend: Backend, known: Machine, request: Request, here: Machine) -> tuple[str, ...]:
    return backend.check(replace(request, device=f"{known.device_type}:0"), known)
