"""The example of a third party's platform, as its user has it: wheels in an empty environment, the kit over them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.snippets import snippets
from tests.packaging.distributions import ROOT, build, lend, run

TOYCHIP = ROOT / "examples" / "polyattn-toychip"
#: What the environment has besides the two wheels, lent by this one.
LENT = ("torch", "numpy", "pytest", "hypothesis")
KIT = ("-p", "polyattn.testing.plugin", "-p", "no:cacheprovider", "--pyargs", "polyattn.testing", "-q")


@dataclass(frozen=True)
class Home:
    """An environment with the wheels of the core and of the example, and of nothing else of this checkout."""

    python: str
    folder: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """What its Python says; nothing of this checkout is on its path."""
        ours = ("POLYATTN_", "PYTHON", "TORCH_DEVICE", "TOYCHIP_", "COV_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return subprocess.run(
            [self.python, *arguments], env={**clean, "OMP_NUM_THREADS": "1", **variables}, cwd=self.folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def kit(self, backend: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command that the README tells a plugin's author."""
        return self.run("-m", "pytest", *KIT, "--polyattn-backend", backend, *more, **variables)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("toychip")
    for project in (ROOT, TOYCHIP):
        build(project, "wheel", folder / "wheels")
    venv.create(folder / "venv")
    python = str(folder / "venv" / "bin" / "python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    paths = [lend(name, folder / f"lent-{name}") for name in LENT]
    (Path(site) / "lent.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    # No index: what the wheels need is here, or the installation fails.
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", "--no-index",
        "--find-links", str(folder / "wheels"), "polyattn-toychip",
    )  # fmt: skip
    return Home(python, folder)


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tests passed; fails where one did not, or was skipped."""
    found = re.search(r"^(\d+) passed(?:, \d+ deselected)? in ", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert found, done.stdout[-400:]
    return int(found[1])


def test_it_is_the_wheel_that_runs(home: Home) -> None:
    code = "import polyattn, polyattn_toychip as toy, toychip_runtime; print(polyattn.__file__, toy.__file__)"
    done = home.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("site-packages") == 2
    assert str(ROOT) not in done.stdout


@pytest.mark.slow
def test_the_kernels_backend_passes_the_whole_kit(home: Home) -> None:
    assert passed(home.kit("toychip:rows")) > 3000


@pytest.mark.slow
def test_what_the_kernel_lacks_is_right_too(home: Home) -> None:
    # the core's own forwards, which the CPU's tests put to the whole kit: some of it shows that the device carries them
    chosen = "float32 and (mask/ or paged/) and not garbage and not compiled"
    assert passed(home.kit("toychip:blocked", "-k", chosen)) > 200


def test_its_own_tests_pass(home: Home) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={home.folder}", str(TOYCHIP / "tests"))
    assert passed(home.run(*command, "-c", os.devnull)) > 5


def test_its_readmes_block_runs(home: Home) -> None:
    (block,) = snippets(TOYCHIP / "README.md")
    done = home.run("-c", block.text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("toychip\n")
    assert "route    toychip:rows" in done.stdout


#: A fault planted into a copy of the package -> file, text, what it becomes, the cases that must find it.
FAULTS = {
    "an LSE left in base 2": ("rows.py", "(log2 * math.log(2.0))", "log2", "dense/plain+lse[float32]"),
    "rows without a key left as the kernel has them": (
        "rows.py", "    sight.blank_blind(result, lse, cu_q, cu_k, k.shape[0], causal, window)\n", "",
        "dense/causal and float32",
    ),
    "a window claimed, and dropped": ("backends.py", "    causal=True,\n", "    causal=True,\n    window=True,\n",
                                      "dense/window and float32"),
    "a head dim claimed that the kernel has no program for": (
        "backends.py", "head_dims=range(16, 129, 16)", "head_dims=None", "dense/ and float32 and head_dim",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_finds(home: Home, tmp_path: Path, fault: str) -> None:
    file, text, instead, cases = FAULTS[fault]
    package = tmp_path / "polyattn_toychip"
    shutil.copytree(TOYCHIP / "src" / "polyattn_toychip", package)
    source = (package / file).read_text(encoding="utf-8")
    assert source.count(text) == 1
    (package / file).write_text(source.replace(text, instead), encoding="utf-8")
    # pytest's own import mode would put the installed package before the copy
    done = home.kit("toychip:rows", "-k", cases, "--import-mode=importlib", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"\d+ failed", done.stdout)


def test_where_the_device_is_hidden_the_kit_skips_and_can_be_made_to_fail(home: Home) -> None:
    hidden = {"TOYCHIP_VISIBLE_DEVICES": ""}
    skipped = home.kit("toychip:rows", "-rs", **hidden)
    assert "no device is seen, with TOYCHIP_VISIBLE_DEVICES=''" in skipped.stdout
    assert "failed" not in skipped.stdout
    required = home.kit("toychip:rows", "--require-platform=toychip", **hidden)
    assert required.returncode == 1
    assert "no device is seen" in required.stdout


def test_nothing_of_polyattn_knows_its_name() -> None:
    rooms = [ROOT / "core" / "src", *(ROOT / "platforms").glob("*/src")]
    assert len(rooms) == 6
    known = [path for room in rooms for path in room.rglob("*.py") if "toychip" in path.read_text(encoding="utf-8")]
    assert known == []
