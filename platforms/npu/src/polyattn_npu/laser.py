"""`npu:laser`: MindIE-SD's ascend_laser_attention, float16 all the way: what it takes, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Slot
from polyattn_npu import laser_range
from polyattn_npu.detection import FA_TYPE
from polyattn_npu.laser_range import (
    BELOW,
    BLOCK,
    LARGEST,
    LARGEST_SCALE,
    MOST_ROWS,
    TAIL,
    input_scale,
    is_taken,
    largest_score,
    least_scale,
    likely_logit,
    positive,
    too_coarse,
    too_rough,
)
from polyattn_npu.mindie_build import without_plugin
from polyattn_npu.mindie_package import REQUIRES, once_imported
from polyattn_npu.op_limits import HALVES, not_on_this_chip
from polyattn_npu.options import LASER, OP_TYPES, NpuOptions, npu_options

#: Device classes that have it.
ARCHS = ("A2", "A3")

_FORWARD = "polyattn_npu.laser_forward"


def backend() -> Backend:
    """The backend `laser`. `order.py` has it last unless it is asked for, by option or variable."""
    features = Features(gqa=True, out=True, dtypes=HALVES, head_dims=range(1, 129))
    return once_imported(
        Backend(
            "laser",
            (
                Slot(f"{_FORWARD}:dense", features),
                Slot(f"{_FORWARD}:prefix_kv", replace(features, kinds=frozenset({"prefix_kv"}))),
                Slot(f"{_FORWARD}:packed", replace(features, kinds=frozenset({"packed"}), max_documents=1)),
            ),
            requires=REQUIRES,
            check=check,
            options=frozenset({"op_type", "opt_mode", "op_layout", "laser_input_scale", "laser_max_abs"}),
        )
    )


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Its limits, beyond which MindIE-SD would run another op, drop what was asked, or answer NaN."""
    chosen = npu_options(request.options)
    return (
        *without_plugin(machine),
        *not_on_this_chip(LASER, ARCHS, machine),
        *_of_options(machine, chosen),
        *_of_rows(request),
        *_of_range(request, chosen),
    )


def _of_options(machine: Machine, chosen: NpuOptions) -> tuple[str, ...]:
    reasons = []
    if chosen.op_type not in (None, LASER):
        reasons.append(f"op_type={chosen.op_type!r} asks for another op than {LASER}")
    if chosen.opt_mode not in (None, "manual"):
        reasons.append(f"opt_mode={chosen.opt_mode!r} does not run {LASER} for certain: 'manual' does")
    if chosen.op_layout not in (None, "BNSD"):
        reasons.append(f"{LASER} takes op_layout 'BNSD' only, not {chosen.op_layout!r}")
    forced = machine.env.get(FA_TYPE)
    if forced and forced != LASER:
        does = "replaces" if forced in OP_TYPES else "is no op and makes MindIE-SD raise in place of"
        reasons.append(f"{FA_TYPE}={forced!r} {does} {LASER} in its manual mode: unset it")
    return tuple(reasons)


def _rows(request: Request) -> tuple[int, int]:
    """Queries and keys that the op gets, at most: of packed documents routing knows the tensors alone."""
    queries, keys = request.q.shape[-3], request.k.shape[-3]
    if request.structure_kind == "prefix_kv":
        keys = request.structure_facts.common_prefix or 0
        queries = queries if request.structure_facts.queries == "all" else min(queries, keys)
    return queries, keys


def _of_rows(request: Request) -> tuple[str, ...]:
    reasons = []
    queries, keys = _rows(request)
    if min(queries, keys) < laser_range.LEAST_ROWS:
        reasons.append(
            f"{queries} queries and {keys} keys: below {laser_range.LEAST_ROWS} of either MindIE-SD runs "
            "fused_attn_score instead, which is npu:mindie's"
        )
    if max(queries, keys) > MOST_ROWS:
        reasons.append(f"{queries} queries and {keys} keys: it takes {MOST_ROWS} rows at most, npu:fusion more")
    if request.structure_kind == "packed" and not request.structure_facts.host:
        reasons.append(
            "where the document ends is known to the device only: build the Packed from host lengths "
            "(Packed.real_and_pad), or with check=True"
        )
    return tuple(reasons)


def _of_range(request: Request, chosen: NpuOptions) -> tuple[str, ...]:
    keys = _rows(request)[1] if request.structure_kind != "packed" else 1  # how many of a document is not known here
    factor = input_scale(chosen, request.head_dim, keys, request.scale)
    if chosen.laser_max_abs is not None:
        least = least_scale(chosen.laser_max_abs, request.head_dim, keys, request.scale)
        if factor < least and is_taken(least, request.scale):
            most = largest_score(chosen.laser_max_abs / factor, request.head_dim)
            return (
                f"laser_max_abs={chosen.laser_max_abs} with laser_input_scale={factor} lets a score reach {most:.3g}, "
                f"beyond float16's range ({LARGEST:.0f}, or {-TAIL:.0f} beside keys that a block lacks): "
                f"laser_input_scale={least} suffices",
            )
        factor = max(factor, least)
    if factor > LARGEST_SCALE:
        return (
            f"inputs divided by more than {LARGEST_SCALE} (laser_input_scale, laser_max_abs) leave float16's normal "
            "range: use npu:fusion or npu:mindie, which score in float32",
        )
    if too_coarse(factor, request.scale):
        return (
            f"inputs divided by {factor} at scale {request.scale:.3g} leave scores that float16 rounds too coarsely: a "
            "smaller laser_input_scale or laser_max_abs, or npu:fusion or npu:mindie, which score in float32",
        )
    if chosen.laser_input_scale is None and chosen.laser_max_abs is not None:
        reasons = _of_digits(request, chosen.laser_max_abs, factor)
        if reasons:
            return reasons
    if keys % BLOCK and -TAIL * positive(request.scale) * factor * factor < BELOW:
        least = 2 ** math.ceil((math.log2(BELOW / -TAIL) - math.log2(positive(request.scale))) / 2)
        divided = f", or laser_input_scale={least}," if is_taken(least, request.scale) else ""
        return (
            f"scale {request.scale} is so small that keys which the last block of {BLOCK} lacks would take part: "
            f"a multiple of {BLOCK} keys{divided} avoids it",
        )
    return ()


def _of_digits(request: Request, max_abs: float, factor: int) -> tuple[str, ...]:
    if not too_rough(max_abs, request.head_dim, request.scale, request.dtype):
        return ()
    return (
        f"laser_max_abs={max_abs} lets logits reach {likely_logit(max_abs, request.head_dim, request.scale):.3g} by "
        f"independent signs, {math.sqrt(request.head_dim):.0f} times as much by one sign, of which float16 keeps 11 "
        "bits whatever q and k are divided by: npu:fusion and npu:mindie score in float32, or "
        f"laser_input_scale={factor} in its place has such logits rounded",
    )
