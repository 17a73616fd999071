"""Which sections there are: facts, conformance of each expected backend, tests, and one benchmark a question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    "small": 150,
    "key_padding": 120,
    "row_movement": 90,
    "documents": 150,
    "paged": 120,
    "spans": 90,
    "fp8": 120,
    "training": 90,
    "graphs": 150,
    "video_tiles": 300,
    "video": 300,
    "distributed": 300,  # unfinished where there is one device: it is asked for again
}
#: Needs no device, and compiles for many.
_OFFLINE = "tests/kernels/test_compiles_offline.py"
PYTHON = sys.executable


def sections_of(platform: str, *, shards: int, small: bool, root: Path) -> tuple[Section, ...]:
    """All sections of a platform, in the order they run; `small` scales the benchmarks down for a look at the code.

    FileNotFoundError names the benchmarks that have no script.
    """
    missing = [str(path) for name in BENCHMARKS if not (path := root / _script(name)).exists()]
    if missing:
        raise FileNotFoundError(f"no such benchmark: {', '.join(missing)}")
    return (
        Section("facts", 90, ((PYTHON, "benchmarks/cuda/facts.py", "--out", "{out}"),), records=("facts.json",)),
        *(_conformance(f"{platform}:{name}", shards) for name in EXPECTED[platform]),
        *_tests(platform, root),
        *(_benchmark(name, seconds, small) for name, seconds in BENCHMARKS.items()),
    )


def _conformance(backend: str, shards: int) -> Section:
    command = (PYTHON, "scripts/gpu_conformance.py", backend, "--records", "{out}/conformance")
    limits = ("--until", "{until}", "--since", "{started}")
    parts = tuple((*command, *limits, "--part", f"{number}/{shards}") for number in range(shards))
    stem = backend.replace(":", "_")
    name = f"conformance:{backend.partition(':')[2]}"
    return Section(name, 540, parts, restarts=20, records=(f"conformance/{stem}.*.jsonl",))


def _tests(platform: str, root: Path) -> tuple[Section, ...]:
    """The platform's tests on a device and those of the portable kernels, which run natively there.

    The kit's own cases run in the conformance sections.
    """
    if platform == "cpu":
        return (_pytest("pytest", [root / "tests" / "unit" / "cli" / "test_info.py"]),)
    on_device = sorted((root / "platforms" / platform / "tests" / "on_device").glob("test_*.py"))
    kernels = sorted(set((root / "tests" / "kernels").glob("test_*.py")) - {root / _OFFLINE})
    return (
        _pytest("pytest", on_device, "-m", platform, f"--require-platform={platform}"),
        _pytest("kernels", kernels),
    )


def _pytest(name: str, files: Sequence[Path], *options: str) -> Section:
    """A process each file; its reports lie in a folder of the section's name."""
    command = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", *options)
    parts = tuple((*command, str(path), f"--junitxml={{out}}/{name}/{path.stem}.xml") for path in files)
    return Section(name, 540, parts, records=(f"{name}/*.xml",))


def _benchmark(name: str, seconds: int, small: bool) -> Section:
    command = (PYTHON, _script(name), "--out", "{out}", *(("--small",) if small else ()))
    return Section(f"bench:{name}", seconds, (command,), alone=True, records=(f"{name}.json",))


def _script(name: str) -> str:
    return f"benchmarks/cuda/{name}.py"
