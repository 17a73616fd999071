"""Where `import torch` fails: info says what to do and all it can, the others say why they cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from polyattn.environment import VARIABLES
from tests.unit.discovery.conftest import install

RAISED = "Failed to load the backend extension: torch_npu."
MISSING = "libhccl.so: cannot open shared object file"
#: What info makes of the two.
TOLD = f"RuntimeError: {RAISED} (caused by ImportError: {MISSING})"
NO_RICH = """
import sys

class NoRich:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoRich())
"""


@pytest.fixture
def site(tmp_path):
    """A folder first on the path, with a torch that raises and leaves a variable set, as one beside torch-npu does."""
    (tmp_path / "torch").mkdir()
    left = 'import os\nos.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"\n'
    (tmp_path / "torch" / "__init__.py").write_text(
        f"{left}raise RuntimeError({RAISED!r}) from ImportError({MISSING!r})\n"
    )
    entries = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    install(tmp_path, "torch-npu", {}, {}, {}, version="2.7.1", entry_points=entries)
    return tmp_path


def run(site, *arguments, **environment):
    clean = {
        name: text for name, text in os.environ.items() if name not in (*VARIABLES, "TORCH_DEVICE_BACKEND_AUTOLOAD")
    }
    path = os.pathsep.join([str(site), *filter(None, [clean.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "polyattn", *arguments],
        env={**clean, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_info_says_the_error_the_way_out_and_the_rest(site):
    done = run(site, "info")
    assert done.returncode == 1
    assert done.stderr == ""
    assert TOLD in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
    assert "torch-npu 2.7.1 (torch_npu:_autoload)" in done.stdout
    assert "\n  cpu       accepted  " in done.stdout
    assert "POLYATTN_PLATFORM" in done.stdout


def test_its_json(site):
    done = run(site, "info", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 1
    assert facts["torch"]["error"] == TOLD
    assert facts["torch"]["extensions"] == ["torch-npu 2.7.1 (torch_npu:_autoload)"]
    assert facts["packages"]["torch-npu"] == "2.7.1"
    assert facts["problems"] == [f"torch cannot be imported: {facts['torch']['error']}", facts["torch"]["hint"]]
    assert "RuntimeError" in facts["in_use"][0]["error"]


def test_the_hint_fits_the_cause(site):
    on = json.loads(run(site, "info", "--json").stdout)["torch"]["hint"]
    assert on.startswith("Set TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    off = json.loads(run(site, "info", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout)["torch"]["hint"]
    assert "install torch again" in off
    (site / "torch" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    absent = json.loads(run(site, "info", "--json").stdout)["torch"]["hint"]
    assert absent == 'Install it: pip install "torch>=2.6"'


def test_a_folder_that_is_no_torch(site):
    (site / "torch" / "__init__.py").write_text("")
    done = run(site, "info", "--json")
    assert done.returncode == 1
    assert "is not PyTorch" in json.loads(done.stdout)["torch"]["error"]


@pytest.mark.parametrize(
    "command", [("explain", "--q", "1,8,2,64"), ("verify",), ("demo",), ("plan",), ("info", "--machine")]
)
def test_the_others_say_so_in_one_line(site, command):
    done = run(site, *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"torch cannot be imported: {TOLD}" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr


def test_a_process_without_rich_prints_plain_text(site):
    (site / "sitecustomize.py").write_text(NO_RICH)
    done = run(site, "info", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 1
    assert done.stdout.startswith("problems\n  torch cannot be imported: ")
    assert "\x1b" not in done.stdout


def test_a_reader_that_has_gone_is_no_traceback(site):
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-m", "polyattn", "info"],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
