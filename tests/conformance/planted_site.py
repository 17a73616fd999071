"""Installs planted backends: a site directory with one distribution and its entry points."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PLANTED = Path(__file__).with_name("planted")
NOT_BACKENDS = ("steps", "worker", "__init__")


def planted_backends() -> list[str]:
    """Their names, those of their files."""
    return sorted(path.stem for path in PLANTED.glob("*.py") if path.stem not in NOT_BACKENDS)


def install(site: Path, names: Iterable[str]) -> dict[str, str]:
    """The environment of a process that has these installed in `site`, each as "cpu.<name>"."""
    for path in PLANTED.glob("*.py"):
        (site / f"planted_{path.name}").write_text(path.read_text())
    info = site / "planted_attn-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-attn\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    lines = [f"cpu.{name} = planted_{name}:backend" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *lines, ""]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYATTN_")}
    return clean | {"PYTHONPATH": str(site), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
