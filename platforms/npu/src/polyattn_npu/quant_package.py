"""Whether the installed MindIE-SD has quant_attention, and in which precisions: 3.1.0 does not, newer builds do."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from polyattn.vendor import Machine
from polyattn_npu.detection import has_installed
from polyattn_npu.mindie_package import PACKAGE, import_failure, package

FUNCTION = "quant_attention"
#: The name, among a machine's build facts, of the precisions that its quant_attention takes; none where it has none.
FACT = "mindiesd_quant_attention"


def without_precision(precision: str, machine: Machine) -> tuple[str, ...]:
    """Why the machine's MindIE-SD cannot run this precision.

    It is imported to find out, unless the machine states it: neither a release nor a file tells what a build has.
    """
    known = machine.build_facts.get(FACT)
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
    return tuple(name for name in ("fp8", "mxfp8", "mxfp4") if _refusal(function, name) != unknown)


def _refusal(function: Any, precision: str) -> str:
    """What it says to no tensors in this precision, whatever the precision is called."""
    try:
        function(None, None, None, precision=precision)
    except Exception as error:  # ValueError of a build, AttributeError of another
        return f"{type(error).__name__}: {error}".replace(repr(precision), "")
    return ""
