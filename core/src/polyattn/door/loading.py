"""Whether what a backend calls loads in this process: the last thing that a check asks, since the answer imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import metadata

from polyattn.door.backend import Slot
from polyattn.door.platform import Machine
from polyattn.door.request import Request
from polyattn.door.resolution import unmet

Bind = Callable[[], object]
Check = Callable[[Request, Machine], tuple[str, ...]]


def loaded_last(check: Check, slots: Sequence[Slot], package: str, module: str, bind: Bind) -> Check:
    """`check`, and then, for a request that it and one of the slots would take, `load_failure`.

    So nothing is imported, which may take minutes, for a request that is refused anyway.
    """
    return partial(_checked, check, tuple(slots), package, module, bind)


def _checked(
    check: Check, slots: tuple[Slot, ...], package: str, module: str, bind: Bind, request: Request, machine: Machine
) -> tuple[str, ...]:
    reasons = tuple(check(request, machine))
    if reasons or all(unmet(slot.features, request) for slot in slots):
        return reasons
    failure = load_failure(machine, package, module, bind)
    return (failure,) if failure else ()


def load_failure(machine: Machine, package: str, module: str, bind: Bind) -> str:
    """Why an installed distribution does not load in this process; empty where it does, or is not here.

    `bind` imports what the slots call from `module` and takes it apart. It runs once a process, and not for a machine
    that is only described: one with another release of the distribution, or another torch, than this process has.
    """
    if not is_here(machine, package, module):
        return ""
    error = _error(bind)
    if not error:
        return ""
    release = " ".join(filter(None, (package, machine.versions.get(package, ""))))
    way = "a build of it for this torch may be, or use another backend"
    return f"{release} is installed and cannot be used in this process ({error}): {way}"


def is_here(machine: Machine, package: str, module: str) -> bool:
    """Whether what this process finds of a distribution is what `machine` has, which may be described only."""
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    if machine.versions.get("torch", torch) != torch:
        return False
    release = _installed(package)
    if not release:  # put on the path by itself
        return _findable(module.partition(".")[0])
    return machine.versions.get(package) == release


@cache
def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _findable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: a module that someone put there, without a spec
        return name in sys.modules


@cache
def _error(bind: Bind) -> str:
    try:
        bind()
    except (Exception, SystemExit) as error:  # packages end the process where they find another torch
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return ""


def forget() -> None:
    """Ask anew: what is installed has changed."""
    _installed.cache_clear()
    _error.cache_clear()
