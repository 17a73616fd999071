"""Which FlashAttention-3 is installed and what it was built with: facts of files, nothing is loaded."""

from __future__ import annotations

import importlib.util
import runpy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True)
class FA3Build:
    """One build of FlashAttention-3, as far as it is used: windows, pages and its own backward are left to others.

    package     its distribution; extension: the module that registers `torch.ops.<namespace>.fwd`
    installed   False: no build is here, and these are the facts of the one that the registry has
    """

    package: str
    extension: str
    namespace: str
    installed: bool
    fp16: bool
    softcap: bool
    fp8: bool
    split: bool
    varlen: bool


#: Distribution, module with the build's flags, extension, its operators' namespace. Upstream has more: it is first.
_BUILDS = (
    ("flash_attn_3", "flash_attn_config", "flash_attn_3._C", "flash_attn_3"),
    ("fa3-fwd", "fa3_fwd_config", "fa3_fwd._C", "fa3_fwd"),
)

#: What the registry's fa3-fwd 0.0.3 is built without, of what is used.
_WITHOUT = ("FP16",)


def installed_build() -> FA3Build:
    """The build that would run here."""
    for package, config, extension, namespace in _BUILDS:
        if _is_installed(package):
            return _build(package, extension, namespace, True, _flags(config))
    package, _, extension, namespace = _BUILDS[-1]
    return _build(package, extension, namespace, False, {})


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _flags(config: str) -> dict[str, Any]:
    """The build's flags; none where its file is missing, as in old builds, which then count as the registry's."""
    spec = importlib.util.find_spec(config)
    if spec is None or spec.origin is None:
        return {}
    flags: dict[str, Any] = runpy.run_path(spec.origin).get("CONFIG", {}).get("build_flags", {})
    return flags


def _build(package: str, extension: str, namespace: str, installed: bool, flags: dict[str, Any]) -> FA3Build:
    def has(feature: str) -> bool:
        return not flags.get(f"FLASHATTENTION_DISABLE_{feature}", feature in _WITHOUT)

    return FA3Build(
        package, extension, namespace, installed,
        fp16=has("FP16"), softcap=has("SOFTCAP"), fp8=has("FP8"), split=has("SPLIT"), varlen=has("VARLEN"),
    )  # fmt: skip
