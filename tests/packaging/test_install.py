"""`pip install "polyattn[cuda]"` on a machine that has its torch already: that torch stays, and still imports."""

from __future__ import annotations

import json
import platform
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from tests.packaging.distributions import lend, run

FACTS = """
import json, torch, polyattn
from importlib import metadata
print(json.dumps({
    "torch": torch.__version__,
    "torch_at": torch.__file__,
    "platforms": sorted(point.name for point in metadata.entry_points(group="polyattn.platforms")),
    "installed": sorted(d.name.replace("_", "-").lower() for d in metadata.distributions()),
}))
"""


@pytest.mark.slow
def test_installing_for_cuda_leaves_torch_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    torchs = lend("torch", tmp_path / "torchs")
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # pip sees what is lent as installed, and could put another torch before it, but not remove it.
    (Path(site) / "lent.pth").write_text(f"{torchs}\n", encoding="utf-8")

    found = wheels["polyattn"].parent
    run(python, "-m", "pip", "install", "--disable-pip-version-check", "--find-links", str(found), "polyattn[cuda]")

    facts = json.loads(run(python, "-c", FACTS))
    assert facts["torch"] == metadata.version("torch")
    assert Path(facts["torch_at"]).is_relative_to(torchs)
    assert facts["platforms"] == ["cpu", "cuda"]
    assert {"polyattn", "polyattn-cuda"} <= set(facts["installed"])
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert "fa3-fwd" in facts["installed"]
    assert not [
        name for name in facts["installed"] if name in ("polyattn-rocm", "polyattn-npu", "torch-npu", "flash-attn")
    ]
