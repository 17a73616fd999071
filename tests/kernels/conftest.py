"""Where the kernels' tests run: on a GPU where there is one, else under Triton's interpreter in a process of their own.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, and then holds for the whole process, which
would change what other tests run. So each file of this folder is run once in a child process, as far as its tests
were selected, and every test here reports what its twin there did. A file with `INTERPRETED = False` runs as it is.

The interpreter computes bf16 dots wrongly, without an error: here they raise, and `dtypes` gives what a test may use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_ROOT = Path(__file__).parents[2]
#: What a child may take to run one file, in seconds.
_PATIENCE = 900


@cache
def _accelerator() -> str | None:
    """The type of device that kernels run on natively, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the tensors that kernels are given."""
    return "cpu" if _INTERPRETING else _accelerator() or "cpu"


@pytest.fixture(scope="session")
def dtypes() -> tuple[torch.dtype, ...]:
    """What kernels are tested in: bf16 only natively."""
    half = (torch.float32, torch.float16)
    return half if _INTERPRETING or _accelerator() is None else (*half, torch.bfloat16)


@pytest.fixture(scope="session", autouse=True)
def _no_interpreted_bf16_products() -> Iterator[None]:
    """A wrong product would look like a wrong kernel, or like a right one where the tolerance is wide."""
    if not _INTERPRETING:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def guarded(self: InterpreterBuilder, a: Any, b: Any, *others: Any) -> Any:
        if tl.bfloat16 in (a.dtype, b.dtype):
            raise TypeError("bf16 products are wrong in Triton's interpreter: take the dtypes of the fixture `dtypes`")
        return multiply(self, a, b, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", guarded)
        yield


def _in_child(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    if _INTERPRETING or _accelerator() is not None or module is None or module.path.parent != Path(__file__).parent:
        return False
    return bool(getattr(module.obj, "INTERPRETED", True))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that one child runs stay on one of the workers that `make test` distributes them over."""
    for item in items:
        if _in_child(item):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


class _Twins:
    """What the selected tests did in their child processes."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self.selected: dict[Path, list[str]] = {}
        self.found: dict[Path, dict[str, tuple[str, str]]] = {}
        for item in items:
            if _in_child(item):
                self.selected.setdefault(item.path, []).append(item.nodeid.removesuffix(f"@{item.path.name}"))

    def outcome(self, item: pytest.Item) -> tuple[str, str]:
        if item.path not in self.found:
            self.found[item.path] = _run(self.selected[item.path])
        return self.found[item.path].get(item.name, ("error", "the child process did not report this test"))


_TWINS = pytest.StashKey[_Twins]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Only what was selected runs in the children."""
    session.config.stash[_TWINS] = _Twins(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report the twin instead of running the test."""
    if not _in_child(pyfuncitem):
        return None
    state, text = pyfuncitem.config.stash[_TWINS].outcome(pyfuncitem)
    if state == "skipped":
        pytest.skip(text)
    if state != "passed":
        pytest.fail(f"under Triton's interpreter:\n{text}", pytrace=False)
    return True


def _run(nodeids: list[str]) -> dict[str, tuple[str, str]]:
    """Test name -> its state and report, from one pytest process under the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        child = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *nodeids],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        if not report.exists():
            return dict.fromkeys(map(_name, nodeids), ("error", child.stdout + child.stderr))
        return dict(_states(report))


def _name(nodeid: str) -> str:
    return nodeid.split("::", 1)[1]


def _states(report: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for case in ElementTree.parse(report).iter("testcase"):
        state, text = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                state, text = child.tag, child.text or child.get("message") or ""
        yield case.get("name", ""), (state, text)
