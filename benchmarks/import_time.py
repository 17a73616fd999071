"""What does `import polyattn`, with the call itself loaded, add to `import torch`? New processes, interleaved.

python benchmarks/import_time.py [--write] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from _measure import report, target

ADDED = """
import time, torch
start = time.perf_counter()
{statement}
print((time.perf_counter() - start) * 1e3)
"""
STATEMENTS = {"import polyattn": "import polyattn", "and attention": "import polyattn; polyattn.attention"}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(asked.rounds):
        for name, statement in STATEMENTS.items():
            code = ADDED.format(statement=statement)
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            samples[name].append(float(run.stdout))
    times = {name: statistics.median(taken) for name, taken in samples.items()}
    # what the first call loads is told, not judged: the limit is for the import
    targets = {"import polyattn, ms above import torch": target(times["import polyattn"], at_most=25.0)}
    return report(
        "import_time", {"milliseconds": times, "raw milliseconds": samples, "targets": targets}, write=asked.write
    )


if __name__ == "__main__":
    sys.exit(main())
