"""`polyattn bench`: every backend of the current platform on named shapes, in turns; a table, bars and files."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyattn.bench.order_file import MeasuredOrder, Orders, size_of, write_order
from polyattn.bench.plot import bar, can_draw, draw
from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import clock_of
from polyattn.bench.trial import Trial, try_backends
from polyattn.cli.failure import UsageError
from polyattn.cli.progress import progress
from polyattn.cli.report import Section, show, show_json
from polyattn.discovery import backends_of, current_platform
from polyattn.errors import UnsupportedRequest
from polyattn.vendor import Machine, Platform

_SHORTEST = 60  # characters of a reason in the table; JSON has all


@dataclass(frozen=True)
class Wanted:
    """What the user asks for: names (none: all), seconds a shape, and files to write."""

    shapes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    dtype: str | None = None
    seconds: float = 2.0
    write_order: Path | None = None
    plot: Path | None = None


def bench(wanted: Wanted, *, as_json: bool) -> int:
    """Measure and tell; 0: every shape ran on some backend, 1: one ran on none."""
    platform = current_platform.platform
    _check(wanted, platform)
    machine = current_platform.machine()
    trials = {}
    names = tuple(dict.fromkeys(wanted.shapes or SHAPES))
    with progress(names) as begins:
        for name in names:
            begins(name)
            trials[name] = _trial(name, wanted, platform)
    facts = facts_of(trials, machine)
    if wanted.write_order is not None:
        _write(wanted.write_order, orders_of(trials, machine))
    if wanted.plot is not None:
        charts = {_title(name, facts["shapes"][name]): trial.milliseconds() for name, trial in trials.items()}
        _draw(wanted.plot, {title: times for title, times in charts.items() if times}, facts)
    if as_json:
        show_json(facts)
    else:
        show(sections_of(facts))
    return 0 if all(trial.milliseconds() for trial in trials.values()) else 1


def facts_of(trials: Mapping[str, Trial], machine: Machine) -> dict[str, Any]:
    """Everything measured, JSON-ready."""
    return {
        "machine": machine.as_dict(),
        "date": time.strftime("%Y-%m-%d"),
        "shapes": {
            name: _shape_facts(name, trial, small=_is_small(machine) and _scales(name))
            for name, trial in trials.items()
        },
    }


def sections_of(facts: dict[str, Any]) -> list[Section]:
    """The same for people: a table a shape with bars, then what was refused."""
    mark = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    machine = facts["machine"]
    sections = [Section("machine", [(f"{machine['platform']} {machine['arch']} {machine['name']}".strip(),)])]
    for name, shape in facts["shapes"].items():
        rows = shape["backends"]
        table = [
            (
                row["backend"],
                f"{row['milliseconds']:.4g}",
                f"{row['tflops']:.4g}",
                f"{row['ratio']:.2f}",
                row["route"],
                bar(row["ratio"], mark=mark),
            )
            for row in rows
        ]
        sections.append(Section(_title(name, shape), table, ("backend", "ms", "TFLOP/s", "x fastest", "route", "")))
        refused = [(backend, _short(reason)) for backend, reason in shape["refused"].items()]
        sections.append(Section(f"{name}: not timed", refused))
    return sections


def _title(name: str, shape: dict[str, Any]) -> str:
    size = f"q {shape['q']}, scaled down from {shape['title']}" if shape["small"] else shape["title"]
    return f"{name}: {size}, {shape['dtype']}"


def orders_of(trials: Mapping[str, Trial], machine: Machine) -> Orders:
    """The measured order of each shape that is not causal, for `polyattn.bench.order_file`, which knows no other."""
    entries = [
        MeasuredOrder(
            structure=trial.request.structure_kind,
            dtype=trial.request.dtype,
            head_dim=trial.request.head_dim,
            page_size=trial.request.structure_facts.page_size,
            size=size_of(trial.request),
            order=tuple(times),
            milliseconds={name: float(f"{ms:.5g}") for name, ms in times.items()},
        )
        for trial in trials.values()
        if trial.request is not None and not trial.request.causal and (times := trial.milliseconds())
    ]
    return Orders(machine.platform, machine.arch, tuple(entries), machine.name, machine.versions, time.strftime("%F"))


def _trial(name: str, wanted: Wanted, platform: Platform) -> Trial:
    device = torch.empty(0, device=platform.device_type).device
    small = device.type == "cpu"
    dtype = getattr(torch, wanted.dtype or ("float32" if small else "bfloat16"))
    torch.manual_seed(0)
    try:
        work = workload_of(name, device, dtype, small=small)
    except RuntimeError as error:  # a device too small for it
        return Trial(None, {}, {}, {"all": f"failed: {str(error).partition(chr(10))[0]}"}, None)
    return try_backends(work, platform, clock_of(device), seconds=wanted.seconds, names=wanted.backends)


def _shape_facts(name: str, trial: Trial, *, small: bool) -> dict[str, Any]:
    ratios = trial.ratios()
    rounds = trial.timings.as_dict() if trial.timings is not None else {}
    rows = [
        {
            "backend": backend,
            "route": trial.routes[backend],
            "milliseconds": float(f"{ms:.5g}"),
            "tflops": float(f"{trial.tflops(backend):.4g}"),
            "ratio": float(f"{ratios[backend]:.4g}"),
            "rounds": rounds.get(backend, [float(f"{ms:.5g}")]),
        }
        for backend, ms in trial.milliseconds().items()
    ]
    request = trial.request
    return {
        "title": SHAPES[name].title,
        "dtype": None if request is None else request.dtype,
        "q": None if request is None else list(request.q.shape),
        "k": None if request is None else list(request.k.shape),
        "small": small,
        "flops": trial.flops,
        "backends": rows,
        "refused": trial.refused,
    }


def _check(wanted: Wanted, platform: Platform) -> None:
    for option, names, known in (
        ("shapes", wanted.shapes, tuple(SHAPES)),
        ("backends", wanted.backends, tuple(backend.name for backend in backends_of(platform))),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"--{option}: {', '.join(unknown)} not known; there are {', '.join(known)}")
    if wanted.dtype is not None and not getattr(getattr(torch, wanted.dtype, None), "is_floating_point", False):
        raise UsageError(f"--dtype: bfloat16, float16 or float32 is needed, got {wanted.dtype!r}")
    if wanted.plot is not None and not can_draw():
        raise UsageError('--plot: package matplotlib is not installed; pip install "polyattn[bench]"')
    for path in (wanted.write_order, wanted.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such folder")


def _write(path: Path, orders: Orders) -> None:
    try:
        write_order(path, orders)
    except OSError as error:
        raise UsageError(f"{path}: {error}") from error


def _draw(path: Path, charts: Mapping[str, Mapping[str, float]], facts: Mapping[str, Any]) -> None:
    if not charts:
        raise UnsupportedRequest("nothing could be measured, so that there is nothing to draw")
    machine = facts["machine"]
    try:
        draw(path, charts, title=f"{machine['name'] or machine['platform']} {machine['arch']}, {facts['date']}")
    except OSError as error:
        raise UsageError(f"{path}: {error}") from error


def _is_small(machine: Machine) -> bool:
    return machine.device_type == "cpu"


def _scales(name: str) -> bool:
    """Whether the shape has less work when it is small."""
    full, small = (workload_of(name, torch.device("meta"), torch.float32, small=small) for small in (False, True))
    return full.flops != small.flops


def _short(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _SHORTEST else text[: _SHORTEST - 3] + "..."
