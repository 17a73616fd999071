"""`npu:sdpa`: the core's slots on torch's SDPA, without what torch-npu's refuses.

torch-npu runs SDPA as npu_fusion_attention where it may, and then with that op's limits: a boolean mask is handed over
as it is, and the op broadcasts nothing. Additive masks, head dims above 512 and 310P run as torch's plain matmuls.
"""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Machine, Request
from polyattn_npu.op_limits import DTYPES, FUSION_HEAD_DIMS, HALVES, beyond_one_call

#: Gathered blocks run under masks [B,1,1,Sk], which the op does not take; `blocked` has these kinds.
_UNDER_KEY_MASKS = frozenset({"video_tiles", "block_map"})
#: The device class on which torch-npu's SDPA is torch's math.
_BY_MATH = "310P"


def backend(portable: Backend) -> Backend:
    """From the core's own."""
    of_core = portable.check
    slots = tuple(
        replace(slot, features=replace(slot.features, dtypes=slot.features.dtypes & DTYPES))
        for slot in portable.slots
        if not slot.features.kinds & _UNDER_KEY_MASKS
    )

    def checked(request: Request, machine: Machine) -> tuple[str, ...]:
        return (*of_core(request, machine), *check(request, machine))

    return replace(portable, slots=slots, check=checked)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Against what npu_fusion_attention would refuse below SDPA, where SDPA runs it, and biases that it would round."""
    if request.structure_kind == "bias":
        return _rounded(request)
    if machine.arch == _BY_MATH or request.head_dim not in FUSION_HEAD_DIMS:
        return ()
    in_pieces = request.structure_kind in ("packed", "paged")
    rows = 0 if in_pieces else max(request.q.shape[-3], request.k.shape[-3])
    return (*beyond_one_call(request, rows), *_broadcast(request))


def _rounded(request: Request) -> tuple[str, ...]:
    """SDPA takes an additive mask in q's dtype alone: of another it would lose entries' range, or digits that count."""
    given = request.structure_facts.mask_dtype
    if given in (None, request.dtype) or (request.dtype == "float32" and given in HALVES):
        return ()
    return (
        f"torch-npu's SDPA takes an additive mask in q's {request.dtype}, which does not hold what {given} does: "
        "npu:fusion and npu:blocked keep it, or convert the mask yourself",
    )


def _broadcast(request: Request) -> tuple[str, ...]:
    """A mask of fewer axes than the op wants."""
    positions = request.causal or request.window is not None  # put into a mask, they give it a row for each query
    facts, queries = request.structure_facts, request.q.shape[-3]
    shape: tuple[int, ...] | None = None
    if request.structure_kind == "key_padding" and not facts.host:
        shape = (request.q.shape[0], 1, 1, request.k.shape[-3])
    elif request.structure_kind == "mask":
        shape = facts.mask_shape
    if shape is None:
        return ()
    shape = (*shape[:2], queries if positions else shape[2], shape[3])
    batch, heads = request.q.shape[0], request.num_heads
    samples = (1, batch) if shape[1] == 1 else (batch,)
    if shape[0] in samples and shape[1] in (1, heads) and shape[2] == queries:
        return ()
    return (
        f"torch-npu's SDPA hands a boolean mask {list(shape)} to npu_fusion_attention, which broadcasts none and wants "
        f"[{batch},{heads}|1,{queries},{shape[3]}] or [1,1,{queries},{shape[3]}]: npu:fusion expands a Mask, and "
        "npu:blocked takes any",
    )
