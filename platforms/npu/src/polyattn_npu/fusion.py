"""`npu_fusion_attention`, torch-npu's attention with gradients: what it takes, and what it refuses in which words."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Requires, Slot, varlen_padding
from polyattn_npu import cann_limits
from polyattn_npu.op_limits import ARCHS, DTYPES, FUSION_HEAD_DIMS, HINT, beyond_fusion, not_on_this_chip

#: The first torch-npu release whose op states the order of a packed call's statistics, and the CANN that it needs.
TORCH_NPU_ORDERS, CANN_ORDERS = (2, 9), (8, 3)

_FORWARD = "polyattn_npu.fusion_forward"
#: A slot, the kinds that it takes, and what binds it to one shape.
_SLOTS = (
    (f"{_FORWARD}:dense", frozenset({"dense"}), f"{_FORWARD}:bound_dense"),
    (f"{_FORWARD}:prefix_kv", frozenset({"prefix_kv"}), ""),
    (f"{_FORWARD}:key_padding", frozenset({"key_padding"}), ""),
    (f"{_FORWARD}:packed", frozenset({"packed"}), ""),
    (f"{_FORWARD}:mask", frozenset({"mask", "bias"}), ""),
    (f"{_FORWARD}:spans", frozenset({"spans"}), ""),
    (f"{_FORWARD}:packed_spans", frozenset({"packed", "spans"}), ""),
)


def backend() -> Backend:
    """`npu:fusion`. Each slot twice: with an LSE, which has no gradient, and with gradients."""
    forward = Features(
        causal=True, window=True, lse=True, gqa=True, v_dim=True, out=True, dtypes=DTYPES, head_dims=FUSION_HEAD_DIMS
    )
    trained = replace(forward, lse=False, backward=True)
    slots = [
        Slot(call, replace(features, kinds=kinds), bind)
        for call, kinds, bind in _SLOTS
        for features in (forward, trained)
    ]
    return Backend(
        "fusion",
        tuple(slots),
        requires=(Requires("torch-npu", "", HINT),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Boundaries on the device, sizes, the chip, and the releases that order packed statistics."""
    return (
        *varlen_padding.packs_in_place(request, machine),
        *_on_the_device(request),
        *beyond_fusion(request, packs_samples=request.structure_kind == "key_padding"),
        *not_on_this_chip("npu_fusion_attention", ARCHS, machine),
        *_packed_lse(request, machine),
    )


def _on_the_device(request: Request) -> tuple[str, ...]:
    if request.structure_facts.host:
        return ()
    if request.structure_kind == "packed":
        return (
            "npu_fusion_attention takes the documents' boundaries as host integers, and only the device knows these: "
            "build Packed from lengths on the host, or with check=True, which reads them once",
        )
    if request.structure_kind == "key_padding":
        return (
            "npu_fusion_attention takes the kept lengths as host integers, and only the device knows these: "
            "build KeyPadding from lengths or a mask on the host, or with check=True, which reads it once",
        )
    return ()


def _packed_lse(request: Request, machine: Machine) -> tuple[str, ...]:
    """Without softmax_layout the order of a packed call's statistics is not documented."""
    if not request.lse or request.structure_kind not in ("packed", "key_padding") or request.structure_facts.spans:
        return ()
    release, version = machine.versions.get("torch-npu", ""), cann_limits.version_of(machine)
    known = "the order of its packed statistics is stated by softmax_layout"
    reasons = []
    if release and not cann_limits.at_least(release, *TORCH_NPU_ORDERS):
        reasons.append(f"LSE of packed documents: {known}, which torch-npu {release} lacks and 2.9 has")
    if not cann_limits.at_least(version, *CANN_ORDERS):
        reasons.append(
            f"LSE of packed documents: {known}, which CANN 8.3 brought; this is {cann_limits.named(version)}"
        )
    return tuple(reasons)
