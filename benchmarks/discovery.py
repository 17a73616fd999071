"""What do 500 unrelated distributions add to the first `current_platform`? New processes, interleaved; prints JSON.

python benchmarks/discovery.py [--distributions 500] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distributions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crowd(Path(folder), options.distributions)
        inherited = os.environ.get("PYTHONPATH", "")
        paths = {"alone": inherited, "crowded": os.pathsep.join(filter(None, [folder, inherited]))}
        times: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(options.rounds):
            for name, path in paths.items():
                times[name].append(first_read(path))
    alone, crowded = (statistics.median(times[name]) for name in ("alone", "crowded"))
    added = crowded - alone
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    report = {
        "question": f"ms that {options.distributions} unrelated distributions add to the first current_platform",
        "machine": machine | {"polyattn": version("polyattn"), "torch": version("torch")},
        "median_ms": {"alone": round(alone, 2), "crowded": round(crowded, 2), "added": round(added, 2)},
        "limit_ms": LIMIT_MS,
        "within_limit": added <= LIMIT_MS,
        "raw_ms": {name: [round(value, 3) for value in values] for name, values in times.items()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
