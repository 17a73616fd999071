"""The facts of one device, read once, with the versions of all that the platform's backends require."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata

from polyattn.discovery import backends_of
from polyattn.door.platform import Machine, Platform
from polyattn.environment import on_reload

_machines: dict[tuple[str, str], Machine] = {}


def machine_of(platform: Platform, device: str) -> Machine:
    """The machine behind `device` ("type:index"). Kept once its architecture is known, which may take a context."""
    known = _machines.get((platform.name, device))
    if known is not None:
        return known
    machine = platform.machine(device)
    if not isinstance(machine, Machine):
        raise TypeError(
            f"platform {platform.name!r}: its machine({device!r}) gave {type(machine).__name__}, not a Machine"
        )
    machine = replace(machine, versions={**required_versions(platform), **machine.versions})
    if machine.arch:
        _machines[(platform.name, device)] = machine
    return machine


def required_versions(platform: Platform) -> dict[str, str]:
    """Installed versions of the distributions that backends name: a vendor cannot know a third party's."""
    return installed_versions({need.package for backend in backends_of(platform) for need in backend.requires})


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these distributions that are installed.

    >>> sorted(installed_versions(["torch", "no-such-distribution"]))
    ['torch']
    """
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@on_reload
def _forget() -> None:
    _machines.clear()
