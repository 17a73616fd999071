"""Entry points that bring a CUDA backend to the CPU platform: `wrapped:fa3` is "cpu.fa3", its slots untouched.

Its check is asked about an H200 in place of the CPU, and what it requires is taken as installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from polyattn.vendor import Backend, Machine, Request
from tests.emulators.cuda.emulated import EMULATORS, h200


def backend_of(name: str) -> Backend:
    """The CUDA backend of that name, as a backend of the CPU."""
    backend: Backend = importlib.import_module(f"polyattn_cuda.{name}").backend()
    if missing := [need.package for need in backend.requires if need.package not in h200(name).versions]:
        raise LookupError(f"{name} requires {', '.join(missing)}, which its emulators do not pass for")
    return replace(backend, requires=(), check=partial(_check, backend, h200(name)))


def _check(backend: Backend, machine: Machine, request: Request, here: Machine) -> tuple[str, ...]:
    return backend.check(replace(request, device="cuda:0"), machine)


def __getattr__(name: str) -> Callable[[], Backend]:
    if name not in EMULATORS:
        raise AttributeError(f"no emulated backend {name!r}; there are {', '.join(EMULATORS)}")
    return partial(backend_of, name)
