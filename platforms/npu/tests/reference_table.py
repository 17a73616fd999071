"""The table of platforms/npu/README.md: each path of the reference, our backend, the op called, its arguments.

python -m platforms.npu.tests.reference_table      # writes it anew, from calls recorded on the emulated device
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from platforms.npu.tests.recorded_paths import PATHS
from tests.emulators.npu.run_kit import environment

ROOT = Path(__file__).parents[3]
README = ROOT / "platforms" / "npu" / "README.md"
START, END = "<!-- recorded calls: start -->", "<!-- recorded calls: end -->"
#: The machines that the paths are told on; only the A5, and sources of MindIE-SD to come, have quant_attention.
MACHINES = ({"soc": "A2"}, {"soc": "A5", "mindiesd": "unreleased"})


def table() -> str:
    """In the order of PATHS; a path of several calls has a row for each different one."""
    rows = sorted((row for machine in MACHINES for row in _recorded(machine)), key=lambda row: row[0])
    lines = ["| Path | backend | op | arguments beside key and value |", "|---|---|---|---|"]
    for place, calls in groupby(rows, lambda row: row[0]):
        for row, (backend, op, arguments) in enumerate(dict.fromkeys(tuple(call[1:]) for call in calls)):
            title = "" if row else PATHS[place].title
            lines.append(f"| {title} | {'' if row else f'`{backend}`'} | {op} | {arguments} |")
    return "\n".join(lines)


def written() -> str:
    """The table that the README has."""
    return README.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip()


def _recorded(machine: dict[str, str]) -> list[list[str]]:
    command = [sys.executable, "-m", "platforms.npu.tests.recorded_paths", json.dumps(machine)]
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            command, env=environment(Path(site), "2.13.0"), cwd=ROOT, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"{machine}: {done.stderr[-3000:]}")
    rows: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    """Puts the table into the README."""
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{START}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
