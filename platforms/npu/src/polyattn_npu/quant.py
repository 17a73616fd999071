"""`npu:quant`: MindIE-SD's quant_attention, for calls that ask for fp8, mxfp8 or mxfp4; never another precision."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Slot
from polyattn_npu.mindie_build import PRECISIONS, without_plugin, without_precision
from polyattn_npu.mindie_package import REQUIRES
from polyattn_npu.op_limits import DTYPES, not_on_this_chip
from polyattn_npu.options import npu_options

#: The device class that has it: Ascend 950.
ARCHS = ("A5",)
#: Powers of two, for the rotation; whole groups of 32. mxfp4 takes twice as much where it fills keys up.
HEAD_DIMS, HEAD_DIMS_MXFP4 = frozenset({32, 64, 128, 256, 512}), frozenset({32, 64, 128, 256})

_FORWARD = "polyattn_npu.quant_forward"


def backend() -> Backend:
    """The backend `quant`, which takes only calls that are to be quantised."""
    eights = Features(
        gqa=True, out=True, dtypes=DTYPES, head_dims=HEAD_DIMS,
        quant=frozenset({"fp8", "mxfp8"}), exact=False,
    )  # fmt: skip
    fours = replace(eights, quant=frozenset({"mxfp4"}), head_dims=HEAD_DIMS_MXFP4)
    return Backend(
        "quant",
        tuple(
            Slot(f"{_FORWARD}:{kind}", replace(features, kinds=frozenset({kind})))
            for features in (eights, fours)
            for kind in ("dense", "prefix_kv")
        ),
        requires=REQUIRES,
        check=check,
        options=frozenset({"op_layout"}),
        tolerances={"fp8": 0.1, "mxfp8": 0.1, "mxfp4": 0.35},
    )


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Reasons against a quantised call; one that is not quantised is refused by what the slots state."""
    if request.quant not in PRECISIONS:
        return ()
    reasons = [*without_plugin(machine), *not_on_this_chip("quant_attention", ARCHS, machine)]
    layout = npu_options(request.options).op_layout
    if layout == "BSH":
        reasons.append("quant_attention takes op_layout 'BSND' or 'BNSD', not 'BSH'")
    return tuple(reasons) if reasons else without_precision(request.quant, machine)
