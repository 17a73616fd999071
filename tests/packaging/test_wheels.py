"""What the built distributions hold and promise."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, VENDORS, build

ALL = ("polyattn", *(f"polyattn_{vendor}" for vendor in VENDORS))


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


def metadata(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, ".dist-info/METADATA"))


def needs(wheel: Path) -> list[str]:
    return metadata(wheel).get_all("Requires-Dist") or []


def entry_points(wheel: Path) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read_string(read(wheel, ".dist-info/entry_points.txt"))
    return parsed


@pytest.mark.parametrize("name", ALL)
def test_a_wheel_holds_one_typed_package_and_nothing_else(wheels: dict[str, Path], name: str) -> None:
    held = names(wheels[name])
    assert f"{name}/py.typed" in held
    assert f"{name}/__init__.py" in held
    assert {path.partition("/")[0] for path in held} == {name, f"{name}-0.1.0.dist-info"}
    assert not [path for path in held if "/tests/" in path or path.endswith(".pyc")]


@pytest.mark.parametrize("name", ALL)
def test_every_module_of_the_checkout_is_in_the_wheel(
    wheels: dict[str, Path], projects: dict[str, Path], name: str
) -> None:
    source = projects[name] / ("core/src" if name == "polyattn" else "src")
    written = {path.relative_to(source).as_posix() for path in (source / name).rglob("*.py")}
    assert written <= set(names(wheels[name]))


def test_the_demo_finds_its_sentences_in_the_wheel(wheels: dict[str, Path]) -> None:
    assert read(wheels["polyattn"], "polyattn/cli/sentences.txt") == (ROOT / "examples" / "sentences.txt").read_text(
        encoding="utf-8"
    )
    code = """
import polyattn.cli
from polyattn.cli.demo import shipped_sentences
print(polyattn.cli.__file__)
print(len(shipped_sentences().read_text(encoding='utf-8').splitlines()))
"""
    # A wheel can be imported as it is: nothing of this checkout is on the path then.
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(wheels["polyattn"])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    where, sentences = done.stdout.splitlines()
    assert where.startswith(str(wheels["polyattn"]))
    assert int(sentences) >= 24


def test_the_versions_agree(wheels: dict[str, Path]) -> None:
    assert {metadata(wheel)["Version"] for wheel in wheels.values()} == {metadata(wheels["polyattn"])["Version"]}


def test_the_core_states_its_version_itself(wheels: dict[str, Path]) -> None:
    """`polyattn.__version__` is written down: reading metadata would slow `import polyattn`."""
    assert f'__version__ = "{metadata(wheels["polyattn"])["Version"]}"' in read(
        wheels["polyattn"], "polyattn/__init__.py"
    )


def test_the_core_needs_torch_alone(wheels: dict[str, Path]) -> None:
    assert [need for need in needs(wheels["polyattn"]) if "extra ==" not in need] == ["torch>=2.6"]


def test_the_core_has_every_extra_of_the_design(wheels: dict[str, Path]) -> None:
    extras = set(metadata(wheels["polyattn"]).get_all("Provides-Extra") or [])
    assert extras == {*VENDORS, "cli", "demo", "diffusers", "transformers", "bench", "test", "docs"}


def test_what_several_extras_bring_has_one_bound(wheels: dict[str, Path]) -> None:
    bounds: dict[str, set[str]] = {}
    for need in needs(wheels["polyattn"]):
        stated, _, _ = need.partition(";")
        name = re.split(r"[^\w.-]", stated)[0]
        bounds.setdefault(name, set()).add(stated.strip())
    assert {name: stated for name, stated in bounds.items() if len(stated) > 1} == {}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendor_alone_brings_the_core_and_no_kernel(wheels: dict[str, Path], vendor: str) -> None:
    wheel = wheels[f"polyattn_{vendor}"]
    assert [need for need in needs(wheel) if "extra ==" not in need] == ["polyattn~=0.1.0"]
    assert metadata(wheel).get_all("Provides-Extra") == ["runtime"]
    assert f"polyattn-{vendor}[runtime]~=0.1.0; extra == '{vendor}'" in needs(wheels["polyattn"])


@pytest.mark.parametrize("name", ALL)
def test_no_distribution_pins_torch(wheels: dict[str, Path], name: str) -> None:
    """A pin would let `pip install` replace the torch that the user chose for the machine."""
    pinned = [need for need in needs(wheels[name]) if need.startswith("torch") and need != "torch>=2.6"]
    assert pinned == []


def test_entry_points_name_each_platform_once(wheels: dict[str, Path]) -> None:
    core = entry_points(wheels["polyattn"])
    assert dict(core["polyattn.platforms"]) == {"cpu": "polyattn.cpu:platform"}
    assert dict(core["console_scripts"]) == {"polyattn": "polyattn.cli:main"}
    for vendor in VENDORS:
        stated = entry_points(wheels[f"polyattn_{vendor}"])
        assert {group: dict(stated[group]) for group in stated.sections()} == {
            "polyattn.platforms": {vendor: f"polyattn_{vendor}:platform"}
        }


@pytest.mark.parametrize("name", ALL)
def test_nothing_hooks_into_every_pytest_run(wheels: dict[str, Path], name: str) -> None:
    assert "pytest11" not in entry_points(wheels[name])


def test_a_source_archive_of_the_core_holds_the_core(tmp_path: Path) -> None:
    build(ROOT, "sdist", tmp_path)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as held:
        rooms = {name.split("/")[1] for name in held.getnames()}
    assert rooms == {"core", "examples", "README.md", "LICENSE", "PKG-INFO", "pyproject.toml", ".gitignore"}


def test_a_wheel_built_from_the_source_archive_is_the_same(wheels: dict[str, Path], tmp_path: Path) -> None:
    build(ROOT, "sdist", tmp_path / "sdist")
    (archive,) = (tmp_path / "sdist").iterdir()
    with tarfile.open(archive) as held:
        held.extractall(tmp_path / "unpacked", filter="data")
    (project,) = (tmp_path / "unpacked").iterdir()
    build(project, "wheel", tmp_path / "wheel")
    (wheel,) = (tmp_path / "wheel").iterdir()
    assert sorted(names(wheel)) == sorted(names(wheels["polyattn"]))
