"""What do 500 unrelated distributions add to the first `current_platform`? New processes, interleaved.

python benchmarks/discovery.py [--write] [--distributions 500] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _measure import raw, report, target

# Imported before the clock starts: what any program that uses polyattn has imported anyway.
FIRST_READ = """
import importlib.metadata, time
import polyattn.discovery
try:
    import torch, polyattn.cpu
except ImportError:
    pass
start = time.perf_counter()
polyattn.discovery.current_platform.name
print((time.perf_counter() - start) * 1e3)
"""
LIMIT_MS = 60.0


def crowd(folder: Path, distributions: int) -> None:
    """Unrelated distributions as an installer leaves them; a third has entry points, as in a large environment."""
    for number in range(distributions):
        info = folder / f"unrelated_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: unrelated-{number}\nVersion: 1.0\n"
        (info / "METADATA").write_text(head + "Requires-Dist: something>=1\n" * 20 + "\nA long description.\n" * 100)
        (info / "RECORD").write_text(f"unrelated_{number}.py,,\n" * 50)
        if number % 3 == 0:
            (info / "entry_points.txt").write_text(
                f"[console_scripts]\nunrelated-{number} = unrelated_{number}:main\n\n"
                f"[pytest11]\nunrelated = unrelated_{number}.plugin\n"
            )


def first_read(path: str) -> float:
    """Milliseconds of the first read in a new process.

    torch's own scan for device backends is switched off: it would warm importlib.metadata's caches for ours.
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_READ],
        env=os.environ | {"PYTHONPATH": path, "POLYATTN_PLATFORM": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(run.stdout)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--distributions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crowd(Path(folder), asked.distributions)
        inherited = os.environ.get("PYTHONPATH", "")
        paths = {"alone": inherited, "crowded": os.pathsep.join(filter(None, [folder, inherited]))}
        times: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(asked.rounds):
            for name, path in paths.items():
                times[name].append(first_read(path))
    alone, crowded = (statistics.median(times[name]) for name in ("alone", "crowded"))
    targets = {f"{asked.distributions} distributions add, ms": target(crowded - alone, at_most=LIMIT_MS)}
    return report("discovery", {"milliseconds": raw(times), "targets": targets}, write=asked.write)


if __name__ == "__main__":
    sys.exit(main())
