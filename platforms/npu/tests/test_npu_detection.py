"""Detection of Ascend NPU: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

import platform
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import polyattn_npu
from platforms.tests.vendors import forbidden, no_devices, pretend
from polyattn.vendor import Declined, Found
from polyattn_npu import cann, cann_limits, detection
from polyattn_npu.backends import BACKENDS
from tests.emulators.npu.stack import SOCS

DRIVER_FILES = detection.DRIVER_FILES  # the fixture below has none


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def test_its_place_among_platforms() -> None:
    platform = polyattn_npu.platform()
    assert (platform.priority, platform.collective_backend) == (30, "hccl")


def test_architecture_and_name_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "npu",
        is_initialized=lambda: True,
        get_soc_version=lambda: 222,
        get_device_name=lambda index: "Ascend910B3",
    )
    facts = detection.machine("npu:1")
    assert (facts.arch, facts.name) == ("A2", "Ascend910B3")


@pytest.mark.parametrize(
    ("soc", "arch"),
    [
        (199, "soc199"), (200, "310P"), (205, "310P"), (206, "soc206"), (219, "soc219"), (220, "A2"), (225, "A2"),
        (226, "soc226"), (249, "soc249"), (250, "A3"), (255, "A3"), (256, "soc256"), (259, "soc259"), (260, "A5"),
        (261, "soc261"),
    ],
)  # fmt: skip
def test_a_device_class_by_the_vendor_s_number(monkeypatch: pytest.MonkeyPatch, soc: int, arch: str) -> None:
    answers = {"is_initialized": lambda: True, "get_soc_version": lambda: soc, "get_device_name": lambda index: "name"}
    pretend(monkeypatch, "npu", **answers)
    assert detection.machine("npu").arch == arch


def test_a_runtime_that_cannot_tell_its_chip_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("aclrtGetSocName failed")

    pretend(monkeypatch, "npu", is_initialized=lambda: True, get_soc_version=broken, get_device_name=lambda index: "")
    facts = detection.machine("npu")
    assert (facts.arch, facts.name) == ("", "")


def test_the_emulated_machines_are_of_these_classes() -> None:
    assert set(detection.SOC_VERSIONS) == set(SOCS) - {"none"}
    assert all(SOCS[arch][0] in numbers for arch, numbers in detection.SOC_VERSIONS.items())


def test_the_driver_s_files_are_cards_and_not_its_manager() -> None:
    (pattern,) = DRIVER_FILES
    assert fnmatch("/dev/davinci0", pattern)
    assert fnmatch("/dev/davinci15", pattern)
    assert not fnmatch("/dev/davinci_manager", pattern)


def test_torch_npu_s_own_quiet_count_spares_the_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "npu", devices=2, _device_count_ascend_hal=lambda: 2)
    monkeypatch.setattr(detection, "DRIVER_FILES", (__file__,))
    monkeypatch.setattr(detection, "_count_in_child", forbidden)
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 2


def test_the_kernel_packages_are_facts_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "npu")
    monkeypatch.setattr("polyattn.vendor.installed_versions", lambda names: dict.fromkeys(names, "1.0"))
    versions = detection.machine("npu").versions
    needed = {need.package for backend in BACKENDS for need in backend.requires if "npu" in need.package}
    assert {"mindiesd", *needed} <= set(versions)


RECORD = """package_name=Ascend-cann-toolkit
innerversion=V100R001C23SPC001B235
version=8.3.RC1
arch=aarch64
"""


def cann_in(home: Path, record: str = "ascend_toolkit_install.info", text: str = RECORD) -> None:
    folder = home / f"{platform.machine()}-linux"
    folder.mkdir(exist_ok=True)
    (folder / record).write_text(text)


def test_cann_s_version_is_a_fact_of_the_machine_read_from_its_folder(monkeypatch, tmp_path) -> None:
    pretend(monkeypatch, "npu", get_soc_version=forbidden, get_device_name=forbidden)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    cann_in(tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    facts = detection.machine("npu:0")
    assert facts.build_facts == {"cann": "8.3.RC1"}
    assert cann_limits.version_of(facts) == "8.3.RC1"


def test_a_loaded_torch_npu_tells_cann_s_version_and_one_that_cannot_leaves_it_to_the_folder(monkeypatch, tmp_path):
    told = {"CANN": "8.5.0"}
    loaded = ModuleType("torch_npu.npu.utils")
    loaded.get_cann_version = lambda: told["CANN"]  # type: ignore[attr-defined]
    for name in ("torch_npu", "torch_npu.npu", "torch_npu.npu.utils"):
        monkeypatch.setitem(sys.modules, name, loaded)
    pretend(monkeypatch, "npu")
    cann_in(tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    for said, known in (("8.5.0", "8.5.0"), ("", "8.3.RC1")):  # "" is its answer for a CANN before 8.1
        told["CANN"] = said
        cann._told.cache_clear()
        assert detection.machine("npu:0").build_facts == {"cann": known}
    cann._told.cache_clear()


@pytest.mark.parametrize("text", ["", "innerversion=V100R001C23\n", "version 8.3\n"])
def test_a_cann_version_that_nobody_states_is_no_fact(monkeypatch, tmp_path, text: str) -> None:
    pretend(monkeypatch, "npu")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert detection.machine("npu:0").build_facts == {}
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "8.3.RC1"))  # a folder's name is no statement
    assert detection.machine("npu:0").build_facts == {}
    cann_in(tmp_path, text=text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert detection.machine("npu:0").build_facts == {}


def test_a_runtime_without_the_toolkit_has_a_record_too(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    cann_in(tmp_path, "ascend_nnrt_install.info", "version=8.2.RC1\n")
    assert cann.recorded() == "8.2.RC1"
    cann_in(tmp_path)
    assert cann.recorded() == "8.3.RC1", "the whole counts first"


def test_without_torch_npu_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cpu")
    monkeypatch.setattr(detection, "_runtime", lambda torch: "")
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "torch-npu is not installed" in found.reason
    assert "CANN" in found.reason


def test_a_torch_npu_without_cann_is_a_reason_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cpu")
    monkeypatch.setattr(detection, "_runtime", lambda torch: "2.13.0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # its import would raise
    found = detection.probe()
    assert isinstance(found, Declined)
    for words in ("torch-npu 2.13.0", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "ASCEND_HOME_PATH", "set_env.sh"):
        assert words in found.reason
