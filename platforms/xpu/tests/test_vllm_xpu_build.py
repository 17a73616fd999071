"""The build of vllm-xpu-kernels that is here: releases that are known, and a package without its kernels."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from polyattn.door import loading
from polyattn.vendor import Accepted, Machine, Request, TensorFacts, resolve
from polyattn_xpu import vllm_xpu, vllm_xpu_build

BMG = Machine("xpu", "xpu", arch="0x500400400", versions={"vllm-xpu-kernels": "0.1.16.2", "torch": "2.14.0+xpu"})


def reasons(machine: Machine) -> str:
    """Against a plain dense call there."""
    q = TensorFacts.contiguous((2, 9, 4, 64), "float16")
    decision = resolve(Request(q, q, q, device="xpu:0", scale=0.125), machine, [vllm_xpu.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


def test_missing_and_old_packages_are_told_with_the_way_to_get_them() -> None:
    assert "pip install vllm-xpu-kernels" in reasons(Machine("xpu", "xpu"))
    assert "older than 0.1.16" in reasons(Machine("xpu", "xpu", versions={"vllm-xpu-kernels": "0.1.4"}))


@pytest.mark.parametrize(("release", "known"), [
    ("0.1.16", True), ("0.1.16.2", True), ("0.1.16+xe", True), ("0.1.17", False), ("0.1.160", False), ("0.2.0", False),
])  # fmt: skip
def test_a_release_whose_kernels_were_not_read_is_refused(release: str, known: bool) -> None:
    told = reasons(Machine("xpu", "xpu", versions={"vllm-xpu-kernels": release}))
    assert told == "" if known else f"{release}: what it is compiled for is known of 0.1.16 alone" in told


def _forget() -> None:
    loading.forget()
    vllm_xpu_build.operator.cache_clear()


def test_a_package_that_imports_without_its_kernels_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, module = types.ModuleType("vllm_xpu_kernels"), types.ModuleType(vllm_xpu_build.MODULE)
    parent.__spec__ = types.SimpleNamespace(name="vllm_xpu_kernels")  # type: ignore[assignment]
    module.FA2_AVAILABLE, module.FA2_UNAVAILABLE_REASON = False, "libze_loader.so.1: not found"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels", parent)
    monkeypatch.setitem(sys.modules, vllm_xpu_build.MODULE, module)
    here = Machine("xpu", "xpu", arch=BMG.arch, versions={**BMG.versions, "torch": torch.__version__})
    _forget()
    try:
        assert "libze_loader.so.1: not found" in reasons(here)
        _forget()
        with pytest.raises(ImportError, match="libze_loader"):
            vllm_xpu_build.operator()
        module.FA2_AVAILABLE = True  # type: ignore[attr-defined]
        module.flash_attn_varlen_func = lambda q, k, v: q  # type: ignore[attr-defined]
        _forget()
        with pytest.raises(RuntimeError, match=r"block_table.*install 0\.1\.16"):
            vllm_xpu_build.operator()
    finally:
        _forget()
