"""Which sections there are: facts, conformance of each expected backend, pytest, and one benchmark a question."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_running import Section

#: Backends that must run on each platform's reference machine (an H200 for cuda).
EXPECTED = {
    "cuda": ("fa3", "fa4", "cudnn", "torch_varlen", "sage", "flex", "triton", "sdpa", "blocked"),
    "cpu": ("sdpa", "blocked"),
}
#: Seconds of each benchmark, most of them for the warm-up and the long shapes.
BENCHMARKS = {
    "dense": 150,
    "host_time": 120,
    "key_padding": 120,
    "row_movement": 90,
    "documents": 150,
    "paged": 120,
    "spans": 90,
    "fp8": 120,
}
PYTHON = sys.executable


def sections_of(platform: str, *, shards: int, small: bool, root: Path) -> tuple[Section, ...]:
    """All sections of a platform, in the order they run; `small` scales the benchmarks down for a look at the code."""
    benchmarks = [
        _benchmark(name, seconds, small) for name, seconds in BENCHMARKS.items() if _script(root, name).exists()
    ]
    return (
        Section("facts", 90, ((PYTHON, "benchmarks/cuda/facts.py", "--out", "{out}"),), records=("facts.json",)),
        *(_conformance(f"{platform}:{name}", shards) for name in EXPECTED[platform]),
        _pytest(platform, root),
        *benchmarks,
    )


def _conformance(backend: str, shards: int) -> Section:
    command = (PYTHON, "scripts/gpu_conformance.py", backend, "--records", "{out}/conformance")
    limits = ("--until", "{until}", "--since", "{started}")
    parts = tuple((*command, *limits, "--part", f"{number}/{shards}") for number in range(shards))
    stem = backend.replace(":", "_")
    name = f"conformance:{backend.partition(':')[2]}"
    return Section(name, 540, parts, restarts=20, records=(f"conformance/{stem}.*.jsonl",))


def _pytest(platform: str, root: Path) -> Section:
    """The tests on a device, a process each file; the kit's own cases run in the conformance sections."""
    if platform == "cpu":
        files, chosen = [root / "tests" / "unit" / "cli" / "test_info.py"], ()
    else:
        files = sorted((root / "platforms" / platform / "tests" / "on_device").glob("test_*.py"))
        chosen = ("-m", platform, f"--require-platform={platform}")
    command = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", *chosen)
    parts = tuple((*command, str(path), f"--junitxml={{out}}/pytest/{path.stem}.xml") for path in files)
    return Section("pytest", 540, parts, records=("pytest/*.xml",))


def _benchmark(name: str, seconds: int, small: bool) -> Section:
    command = (PYTHON, f"benchmarks/cuda/{name}.py", "--out", "{out}", *(("--small",) if small else ()))
    return Section(f"bench:{name}", seconds, (command,), alone=True, records=(f"{name}.json",))


def _script(root: Path, name: str) -> Path:
    return root / "benchmarks" / "cuda" / f"{name}.py"
