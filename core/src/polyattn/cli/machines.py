"""Which device is asked about: one of this machine's, or one that a JSON file describes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyattn.cli.failure import UsageError
from polyattn.cli.installed import platform_named
from polyattn.discovery import current_platform, platform_for, platforms
from polyattn.discovery.loading import cause
from polyattn.discovery.rules import BUILT_IN
from polyattn.discovery.scan import BROKEN
from polyattn.machine import machine_of
from polyattn.plan import owner_of
from polyattn.vendor import Machine, Platform

_TEXTS = ("platform", "device_type", "arch", "name")
_MAPPINGS = ("versions", "build_facts", "env")


def read_machine(path: str) -> Machine:
    """The machine described in a JSON file ("-": standard input); UsageError in one line where it is not one."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        facts = json.loads(text)
    except OSError as error:
        raise UsageError(f"--machine {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise UsageError(f"--machine {path}: not JSON: {error}; `polyattn info --machine` writes one") from error
    if not isinstance(facts, dict):
        raise UsageError(f"--machine {path}: a JSON object is needed, got {type(facts).__name__}")
    try:
        machine = Machine.from_dict(facts)
    except ValueError as error:
        raise UsageError(f"--machine {path}: {error}") from error
    _check_types(path, machine)
    return machine


def platform_of(machine: Machine) -> Platform:
    """The platform of a described machine; its devices need not be here."""
    generic = machine.platform == machine.device_type and machine.platform not in BUILT_IN
    if generic and _is_unowned(machine.device_type):
        return owner_of(machine.device_type)
    try:
        platform = platform_named(machine.platform)
    except LookupError as error:
        raise UsageError(f"--machine: {error}") from error
    if platform.device_type != machine.device_type:
        raise UsageError(
            f"--machine: platform {platform.name!r} has {platform.device_type!r} devices, not {machine.device_type!r}"
        )
    return platform


def device_here(device: str | None) -> tuple[Platform, Machine, str]:
    """The platform, the facts and the full name of a device of this machine (default: the current platform's first)."""
    platform = current_platform.platform if device is None else _owner(device)
    device = platform.device_type if device is None else device
    try:
        machine = machine_of(platform, device)
    except BROKEN as error:
        raise UsageError(f"the facts of device {device!r} cannot be read: {cause(error)}") from error
    return platform, machine, device


def _owner(device: str) -> Platform:
    if not re.fullmatch(r"[a-z][a-z0-9_]*(:[0-9]+)?", device):
        raise UsageError(f"--device: TYPE or TYPE:INDEX is needed, as cpu or cuda:1; got {device!r}")
    kind = device.partition(":")[0]
    platform = platform_for(kind)
    if platform is not None:
        return platform
    absent = [report for report in platforms() if report.device_type == kind]
    if absent:
        raise UsageError(
            f"--device {device}: there is no such device here ({absent[0].name}: {absent[0].reason}). "
            "Describe one with --machine FILE.json, which `polyattn info --machine` writes there"
        )
    if not _is_unowned(kind):
        raise UsageError(f"--device {device}: torch knows no device type {kind!r}")
    return owner_of(kind)


def _is_unowned(device_type: str) -> bool:
    """Whether torch knows the device type and no installed platform serves it."""
    if any(report.device_type == device_type or report.name == device_type for report in platforms()):
        return False
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


def _check_types(path: str, machine: Machine) -> None:
    wanted: dict[str, tuple[str, Any]] = {
        **dict.fromkeys(_TEXTS, ("a text", str)),
        **dict.fromkeys(_MAPPINGS, ("an object", Mapping)),
        "index": ("a number", int),
    }
    for name, (words, kind) in wanted.items():
        given = getattr(machine, name)
        if not isinstance(given, kind):
            raise UsageError(f"--machine {path}: {name} must be {words}, got {given!r}")
    for package, version in machine.versions.items():
        if not isinstance(version, str):
            raise UsageError(f"--machine {path}: versions must be texts, got {version!r} for {package}")
