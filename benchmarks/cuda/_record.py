"""What every script here shares: its arguments, the machine's facts, targets, and the one JSON it leaves."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polyattn.bench.timing import Timings
from polyattn.discovery import current_platform
from polyattn.machine import installed_versions

PACKAGES = ("torch", "triton", "polyattn", "polyattn-cuda", "fa3-fwd", "flash-attn-4", "flash-attn", "sageattention")


@dataclass(frozen=True)
class Asked:
    """Where to write, on what to run, for how long."""

    out: Path | None
    small: bool
    seconds: float
    device: torch.device
    dtype: torch.dtype


def arguments(question: str | None, *, seconds: float = 4.0) -> Asked:
    """The command line of a script; `seconds` is the default for each of its comparisons."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: print only)")
    parser.add_argument("--small", action="store_true", help="scaled down, to see the code run; no target is judged")
    parser.add_argument("--seconds", type=float, default=seconds, help="for each comparison")
    given = parser.parse_args()
    device = torch.empty(0, device=current_platform.device_type).device
    small = given.small or device.type == "cpu"
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Asked(given.out, small, min(given.seconds, 0.5) if small else given.seconds, device, dtype)


@dataclass
class Record:
    """One question's answer: comparisons with raw numbers, targets met or missed, peers that are missing."""

    question: str
    small: bool
    comparisons: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def compare(self, name: str, timings: Timings, base: str, **facts: Any) -> None:
        """Keep medians, ratios to `base` and the raw rounds."""
        names = list(timings.rounds)
        self.comparisons[name] = {
            **facts,
            "milliseconds": {one: float(f"{timings.median(one):.5g}") for one in names},
            "base": base,
            "ratios": {one: float(f"{timings.ratio(one, base):.4g}") for one in names},
            "rounds": timings.as_dict(),
        }

    def target(
        self, name: str, value: float | None, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """A measured value beside its limit; not judged where it is None, for a peer is missing, or scaled down."""
        limit = {"at_most": at_most} if at_most is not None else {"at_least": at_least}
        met: bool | None = None
        if value is not None and not self.small:
            met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        self.targets[name] = {"value": None if value is None else float(f"{value:.4g}"), **limit, "met": met}

    def end(self, script: str, out: Path | None) -> int:
        """Write and print; 1 where a target is missed at full size."""
        name = Path(script).stem
        data = {
            "question": self.question,
            "machine": machine_facts(),
            "small": self.small,
            "targets": self.targets,
            "comparisons": self.comparisons,
            "missing": self.missing,
        }
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        print("\n".join(self._lines()))
        missed = [target for target, state in self.targets.items() if state["met"] is False]
        unjudged = sum(state["met"] is None for state in self.targets.values())
        judged = len(self.targets) - unjudged
        told = f"{judged - len(missed)} of {judged} targets met" + (f", {unjudged} not judged" if unjudged else "")
        print(f"{name}: {told}" + (f"; missed: {', '.join(missed)}" if missed else ""))
        sys.stdout.flush()
        return 1 if missed else 0

    def _lines(self) -> list[str]:
        lines = []
        for name, compared in self.comparisons.items():
            lines.append(name)
            for one, ms in compared.get("milliseconds", {}).items():
                lines.append(f"  {one:<28} {ms:>10.4g} ms  {compared['ratios'][one]:>7.3f} x {compared['base']}")
            lines += [f"  {fact}: {value}" for fact, value in compared.items() if isinstance(value, str | int | float)]
        lines += [f"missing {peer}: {why}" for peer, why in self.missing.items()]
        for name, state in self.targets.items():
            word = {True: "met", False: "MISSED", None: "not judged"}[state["met"]]
            limit = " ".join(
                f"{key.replace('_', ' ')} {value}" for key, value in state.items() if key.startswith("at_")
            )
            lines.append(f"{word:<10} {name}: {state['value']}, {limit}")
        return lines


def machine_facts() -> Mapping[str, Any]:
    """What a reader needs to judge the numbers."""
    machine = current_platform.machine()
    return {
        "device": machine.name,
        "arch": machine.arch,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
        "date": time.strftime("%Y-%m-%d"),
    }


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None
