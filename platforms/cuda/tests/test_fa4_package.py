"""fa4's package: told from what FlashAttention 2 leaves in the same namespace, and named in full where it is broken."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyattn.vendor import Accepted, Machine, Rejected, Request, TensorFacts, resolve
from polyattn_cuda import fa4, fa4_package


@pytest.fixture
def site(tmp_path):
    """A folder of packages, and nothing of the name flash_attn imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            patch.delitem(sys.modules, name)
        fa4_package.functions.cache_clear()
        yield tmp_path
        fa4_package.functions.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]


@contextmanager
def found_in(*folders: Path) -> Iterator[None]:
    """Packages are looked for in these folders alone; only while they are, since pytest looks for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder) for folder in folders])
        importlib.invalidate_caches()
        yield


def problem_in(*folders: Path) -> str:
    with found_in(*folders):
        return fa4_package.broken_install()


def failure_in(*folders: Path) -> str:
    with found_in(*folders):
        try:
            fa4_package.functions()
        except RuntimeError as error:
            return str(error)
    return ""


def lay(site: Path, *files: str, text: str = "") -> None:
    """flash-attn-4's metadata, and these files of flash_attn."""
    info = site / "flash_attn_4-4.0.0b36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    for name in files:
        path = site / "flash_attn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def decision(**versions: str) -> Accepted | Rejected:
    """The backend's, for plain attention on an H200 with these packages."""
    tensor = TensorFacts.contiguous((1, 8, 2, 64), "bfloat16")
    asked = Request(tensor, tensor, tensor, device="cuda:0", structure_kind="dense", scale=0.125)
    return resolve(asked, Machine("cuda", "cuda", arch="sm_90", versions=versions), [fa4.backend()])[0]


def test_without_the_distribution_that_is_the_reason(site):
    assert problem_in(site) == ""
    answer = decision()
    assert isinstance(answer, Rejected)
    assert answer.missing_package
    assert "flash-attn-4" in answer.reasons[0]


def test_the_namespace_alone_is_not_the_package(site):
    lay(site, "layers/rotary.py")  # what FlashAttention 2's uninstalled package leaves
    with found_in(site):
        assert importlib.util.find_spec("flash_attn") is not None
    assert "cute/block_sparsity.py" in problem_in(site)


def test_an_older_copy_by_flash_attention_2_hides_the_package(site, monkeypatch):
    lay(site, "cute/block_sparsity.py")
    assert problem_in(site) == ""
    other = site / "first"
    (other / "flash_attn" / "cute").mkdir(parents=True)
    (other / "flash_attn" / "__init__.py").write_text("raise ImportError('its extension')")
    problem = problem_in(other, site)
    assert str(other) in problem
    assert "install flash-attn-4 anew" in failure_in(other, site)
    monkeypatch.setattr(fa4, "BROKEN", problem)
    described = decision(**{"flash-attn-4": "4.0.0b36"})
    assert problem not in str(described), "of this process, not of a machine that is described"
    monkeypatch.setattr(fa4, "is_here", lambda *_: True)
    answer = decision(**{"flash-attn-4": "4.0.0b36"})
    assert isinstance(answer, Rejected)
    assert problem in answer.reasons


def test_a_failing_import_names_what_failed(site):
    lay(site, "cute/block_sparsity.py", "cute/interface.py", text="raise AttributeError('cutlass has no such thing')")
    failure = failure_in(site)
    assert "AttributeError: cutlass has no such thing" in failure
    assert "nvidia-cutlass-dsl" in failure


def test_functions_that_take_other_arguments_are_named(site):
    lay(site, "cute/block_sparsity.py", "cute/interface.py", text="def _flash_attn_fwd(q, k, v): ...")
    failure = failure_in(site)
    assert "_flash_attn_fwd does not take causal" in failure
    assert "FlashAttention 2" in failure
