"""What a machine's build of MindIE-SD has: plugins for some releases of torch, some precisions of quant_attention."""

from __future__ import annotations

import importlib.util
import runpy
from functools import lru_cache
from pathlib import Path
from typing import Any

from polyattn.vendor import Machine
from polyattn_npu.detection import PLUGIN_VARIANT, has_installed
from polyattn_npu.mindie_package import PACKAGE, import_failure, package

#: The name, among a machine's build facts, of the torch releases ("2.13") that its mindiesd has plugins for.
PLUGINS = "mindiesd_plugins"
#: Its function for quantised calls: 3.1.0 has none, newer builds do.
FUNCTION = "quant_attention"
#: All that it may take, and the name among a machine's build facts of what it does; none where the build lacks it.
PRECISIONS, QUANT_FACT = ("fp8", "mxfp8", "mxfp4"), "mindiesd_quant_attention"


def without_plugin(machine: Machine) -> tuple[str, ...]:
    """Against a torch that mindiesd has no plugin for: importing it would fail."""
    plugins = machine.build_facts.get(PLUGINS)
    if plugins is None and has_installed(machine, PACKAGE):
        plugins = _plugins()
    torch = ".".join(machine.versions.get("torch", "").split(".")[:2])
    if not plugins or not torch or torch in plugins or machine.env.get(PLUGIN_VARIANT):
        return ()
    have = machine.versions.get(PACKAGE, "")
    return (
        f"{PACKAGE} {have} has plugins for torch {', '.join(plugins)}, and this is {torch}: install one of these, or a "
        f"{PACKAGE} that has a plugin for {torch} ({PLUGIN_VARIANT} forces one of those it has)",
    )


@lru_cache(maxsize=1)
def _plugins() -> tuple[str, ...]:
    """The torch releases of the installed one's plugins; none where its file is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return ()
    table = Path(spec.origin).with_name("_torch_variants.py")
    if not table.is_file():
        return ()
    return tuple(runpy.run_path(str(table)).get("SUPPORTED_TORCH_PLUGIN_VARIANTS", ()))


def without_precision(precision: str, machine: Machine) -> tuple[str, ...]:
    """Why the machine's MindIE-SD cannot run this precision.

    It is imported to find out, unless the machine states it: neither a release nor a file tells what a build has.
    """
    known = machine.build_facts.get(QUANT_FACT)
    have = machine.versions.get(PACKAGE, "")
    if known is None:
        if not has_installed(machine, PACKAGE):
            return ()  # a described machine that does not state it
        failure = import_failure()
        if failure:
            return (failure,)
        known = _taken()
    if not known:
        return (f"{PACKAGE} {have} has no {FUNCTION}: it came after 3.1.0, install a build of MindIE-SD that has it",)
    if precision not in known:
        return (f"the {FUNCTION} of {PACKAGE} {have} takes {', '.join(known)}, not {precision}",)
    return ()


@lru_cache(maxsize=1)
def _taken() -> tuple[str, ...]:
    """The precisions that the imported one takes: it refuses an unknown one before it looks at anything else."""
    function = getattr(package(), FUNCTION, None)
    if function is None:
        return ()
    unknown = _refusal(function, "?")
    return tuple(name for name in PRECISIONS if _refusal(function, name) != unknown)


def _refusal(function: Any, precision: str) -> str:
    """What it says to no tensors in this precision, whatever the precision is called."""
    try:
        function(None, None, None, precision=precision)
    except Exception as error:  # ValueError of a build, AttributeError of another
        return f"{type(error).__name__}: {error}".replace(repr(precision), "")
    return ""
