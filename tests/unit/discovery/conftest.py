"""Real distributions for discovery to find: built by each test in a temporary folder, one folder a distribution."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")
VENDORS = ("cuda", "rocm", "npu", "xpu", "musa")

PLUGIN = """
import sys
sys.__dict__.setdefault("asked", []).append("import {name}")
from polyattn.vendor import *

def _probe():
    sys.asked.append("probe {name}")
    return {probe}

def _machine(device):
    return Machine({name!r}, {device_type!r}, versions={{"present": "1.0"}})

def platform():
    return Platform({name!r}, {device_type!r}, {priority}, _probe, _machine, {backends}, api={api},
                    collective_backend="toyccl")
"""


def platform_source(
    name: str,
    device_type: str = "toy",
    priority: int = 50,
    probe: str = "Found('1 device')",
    backends: str = "()",
    api: int = 1,
) -> str:
    """Source of a tiny platform module; `probe` and `backends` are expressions."""
    return PLUGIN.format_map(locals())


@dataclass
class Sites:
    """Builds distributions and asks processes that have them installed."""

    root: Path
    worker: subprocess.Popen[str]
    absent: Path
    paths: list[str] = field(default_factory=list)

    def add(
        self,
        distribution: str,
        modules: dict[str, str] | None = None,
        platforms: dict[str, str] | None = None,
        backends: dict[str, str] | None = None,
        version: str = "1.0",
        entry_points: str | bytes | None = None,
    ) -> str:
        """Install one distribution into a folder of its own; returns that folder."""
        folder = self.root / f"{len(self.paths)}-{distribution}"
        self.paths.append(str(folder))
        return install(folder, distribution, modules or {}, platforms or {}, backends or {}, version, entry_points)

    def add_platform(self, name: str, distribution: str | None = None, **facts: Any) -> str:
        """Install a distribution whose only content is this platform; the module is named toy_<distribution>."""
        distribution = distribution or (f"polyattn-{name}" if name in VENDORS else f"{name}-attn")
        module = "toy_" + re.sub(r"\W", "_", distribution)
        return self.add(distribution, {module: platform_source(name, **facts)}, {name: f"{module}:platform"})

    def ask(self, code: str, env: dict[str, str] | None = None, paths: list[str] | None = None) -> SimpleNamespace:
        """Run the code in a fork of a process that imported polyattn; the code sets `result`."""
        order = [*(self.paths if paths is None else paths), str(self.absent)]
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        self.worker.stdin.write(json.dumps({"paths": order, "env": env or {}, "code": code}) + "\n")
        self.worker.stdin.flush()
        answer = SimpleNamespace(**json.loads(self.worker.stdout.readline()))
        answer.told = [w["text"] for w in answer.warnings if w["type"] == "PolyattnWarning"]
        return answer

    def run(self, code: str, env: dict[str, str] | None = None) -> Any:
        """Run the code in a new process, distributions on PYTHONPATH; its last line of output is the JSON answer."""
        clean = {name: text for name, text in os.environ.items() if not name.startswith("POLYATTN_")}
        # torch would scan entry points at its own import.
        path = [*self.paths, str(self.absent), *filter(None, [clean.get("PYTHONPATH")])]
        clean |= {"PYTHONPATH": os.pathsep.join(path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=clean | (env or {}), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def install(
    folder: Path,
    distribution: str,
    modules: dict[str, str],
    platforms: dict[str, str],
    backends: dict[str, str],
    version: str = "1.0",
    entry_points: str | bytes | None = None,
) -> str:
    """Write what an installer would: modules, METADATA, RECORD and entry_points.txt."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("".join(f"{module}.py,,\n" for module in modules))
    groups = (("polyattn.platforms", platforms), ("polyattn.backends", backends))
    text = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in has.items()) for group, has in groups if has)
    if isinstance(entry_points, bytes):
        (info / "entry_points.txt").write_bytes(entry_points)
    elif entry_points or text:
        (info / "entry_points.txt").write_text(entry_points or text)
    return str(folder)


@pytest.fixture(scope="session")
def absent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vendor distributions without entry points: first on the path, they hide any that this checkout installed."""
    folder = tmp_path_factory.mktemp("absent")
    for name in VENDORS:
        install(folder, f"polyattn-{name}", {}, {}, {}, version="0.0")
    return folder


@pytest.fixture(scope="session")
def worker() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def plugin() -> Callable[..., str]:
    return platform_source


@pytest.fixture
def sites(tmp_path: Path, worker: subprocess.Popen[str], absent: Path) -> Sites:
    return Sites(tmp_path, worker, absent)
