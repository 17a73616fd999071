"""Runs the conformance kit over one emulated backend, in a process of its own that has it installed.

A vendor's `run_kit` is a `Room`: what of this is its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Folders with the vendors' real Python packages that an emulator stands under, where they are not installed.
PACKAGES = "EMULATED_PACKAGES"
DTYPES = ("bfloat16", "float16", "float32")
#: What the longest kit may take on a busy machine, in seconds.
_PATIENCE = 1800


class WorkerFailedError(RuntimeError):
    """The process that runs the kit did not answer; its errors are the text."""


@dataclass(frozen=True)
class Room:
    """One vendor's emulators, `tests/emulators/<vendor>`: backends of the CPU, by the prefix `<vendor>_`."""

    vendor: str
    #: What its emulated backends are called.
    backends: Sequence[str]
    #: How the names begin of variables that are the described machine's alone.
    owned: tuple[str, ...]
    #: Backend -> variables of a process that runs it.
    variables: Callable[[str], Mapping[str, str]] = lambda _: {}
    #: Backend -> what its machine has, where the caller does not say otherwise.
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def run_kit(
        self,
        backend: str,
        *,
        structures: Sequence[str] | None = None,
        dtypes: Sequence[str] = DTYPES,
        named: str = "",
        verbose: bool = False,
        **stack: Any,
    ) -> dict[str, Any]:
        """The kit's report (`polyattn.testing.Report.as_dict`) of one emulated backend.

        `stack` has the fields of the vendor's stack.Stack; lint is on unless it says otherwise. The report has more
        entries: "lints", what lint mode objected to, swallowed or not, and what the vendor's worker counted.
        """
        asked = {
            "backend": backend, "structures": structures, "dtypes": list(dtypes), "named": named, "verbose": verbose,
            "stack": {"lint": True, **self.stacks.get(backend, {}), **stack},
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as site:
            done = subprocess.run(
                [sys.executable, "-m", f"tests.emulators.{self.vendor}.worker", json.dumps(asked)],
                env=self.environment(Path(site), [backend]),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=None if verbose else subprocess.PIPE,
                text=True,
                check=False,
                timeout=_PATIENCE,
            )
        if done.returncode != 0:
            raise WorkerFailedError(f"{backend}: the worker ended with {done.returncode}\n{done.stderr or ''}")
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    def environment(self, site: Path, backends: Sequence[str]) -> dict[str, str]:
        """Variables of a process that has these backends installed in `site`."""
        entries = {f"cpu.{self.vendor}_{one}": f"emulated:{self.vendor}_{one}" for one in backends}
        return self.environment_of(site, entries, backends)

    def environment_of(self, site: Path, entries: Mapping[str, str], backends: Sequence[str] = ()) -> dict[str, str]:
        """As `environment`, with other entry points: their names, and "module:function" within the vendor's folder."""
        lines = [f"{name} = tests.emulators.{self.vendor}.{target}" for name, target in entries.items()]
        install(site, f"emulated-{self.vendor}", {"polyattn.backends": lines})
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("POLYATTN_", *self.owned))}
        for backend in backends:
            clean |= self.variables(backend)
        path = os.pathsep.join(filter(None, (str(ROOT), str(site), clean.get(PACKAGES), clean.get("PYTHONPATH"))))
        return clean | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}

    def command_line(self, description: str | None) -> argparse.ArgumentParser:
        """What every vendor's command takes; a machine's own options are the vendor's to add."""
        parser = argparse.ArgumentParser(
            prog=f"python -m tests.emulators.{self.vendor}.run_kit", description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        parser.add_argument(
            "backend", type=self._name, choices=self.backends, help=f"with or without {self.vendor}: before it"
        )
        parser.add_argument("--structures", type=_words, help="such as dense,packed (default: all, and the claims too)")
        parser.add_argument("--dtypes", type=_words, default=DTYPES)
        parser.add_argument("--named", default="", help="only cases whose name has this")
        parser.add_argument("--no-lint", action="store_false", dest="lint", help="go on where the vendor would")
        parser.add_argument("--verbose", action="store_true", help="name each case on standard error before it runs")
        return parser

    def main(self, parser: argparse.ArgumentParser) -> int:
        """Runs what the command line asks for; the exit status is 0 where the report is ok."""
        report = self.run_kit(**vars(parser.parse_args()))
        json.dump(report, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0 if report["ok"] else 1

    def _name(self, text: str) -> str:
        return text.removeprefix(f"{self.vendor}:")


def install(site: Path, distribution: str, entries: Mapping[str, Sequence[str]], version: str = "1.0") -> None:
    """The record in `site` of an installed distribution with these lines of entry points, by group."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    lines = [line for group, names in entries.items() for line in (f"[{group}]", *names)]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))


def has_package(name: str) -> bool:
    """Whether a vendor's real Python package is installed, or in a folder that `EMULATED_PACKAGES` names."""
    folders = filter(None, os.environ.get(PACKAGES, "").split(os.pathsep))
    return importlib.util.find_spec(name) is not None or any(Path(folder, name).is_dir() for folder in folders)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
