"""`npu_fusion_attention`, torch-npu's attention with gradients: what it takes, and what it refuses in which words."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Requires, Slot, varlen_padding
from polyattn_npu import cann

DTYPES = frozenset({"float16", "bfloat16", "float32"})
#: The op's tiling takes 512; a document says 768.
HEAD_DIMS = range(1, 513)
#: Query heads, rows of q or k, and documents of one packed call, that it takes at most (of documents some say 2048).
MOST_HEADS, MOST_ROWS, MOST_DOCUMENTS = 256, 2**20, 1024
#: The first torch-npu release whose op states the order of a packed call's statistics, and the CANN that it needs.
TORCH_NPU_ORDERS, CANN_ORDERS = (2, 9), (8, 3)

HINT = "pip install torch-npu, of the release that fits your torch and CANN"

_SAMPLES, _PACKED = "polyattn_npu.fusion_forward", "polyattn_npu.fusion_packed"
#: A slot, the kinds that it takes, and what binds it to one shape.
_SLOTS = (
    (f"{_SAMPLES}:dense", frozenset({"dense"}), f"{_SAMPLES}:bound_dense"),
    (f"{_SAMPLES}:prefix_kv", frozenset({"prefix_kv"}), ""),
    (f"{_PACKED}:key_padding", frozenset({"key_padding"}), ""),
    (f"{_PACKED}:packed", frozenset({"packed"}), ""),
    (f"{_SAMPLES}:mask", frozenset({"mask", "bias"}), ""),
    (f"{_SAMPLES}:spans", frozenset({"spans"}), ""),
    (f"{_PACKED}:packed_spans", frozenset({"packed", "spans"}), ""),
)


def backend() -> Backend:
    """`npu:fusion`. Each slot twice: with an LSE, which has no gradient, and with gradients."""
    forward = Features(
        causal=True, window=True, lse=True, gqa=True, v_dim=True, out=True, dtypes=DTYPES, head_dims=HEAD_DIMS
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
    """What features cannot say: boundaries on the device, wider values, many heads, the chip and the release."""
    return (
        *varlen_padding.packs_in_place(request, machine),
        *_on_the_device(request),
        *_sizes(request),
        *_chip(machine),
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


def _sizes(request: Request) -> tuple[str, ...]:
    reasons = []
    if request.v_head_dim > request.head_dim:
        reasons.append(
            f"value head_dim {request.v_head_dim} is larger than the {request.head_dim} of q and k, "
            "which npu_fusion_attention does not take: pad q and k with zeros"
        )
    if request.num_heads > MOST_HEADS:
        reasons.append(f"{request.num_heads} query heads are more than the {MOST_HEADS} of one call")
    rows, kind, documents = most_rows(request), request.structure_kind, request.structure_facts.documents
    if rows > MOST_ROWS:
        reasons.append(f"{rows} rows are more than the {MOST_ROWS} of one call")
    if kind in ("packed", "key_padding") and documents is not None and documents > MOST_DOCUMENTS:
        reasons.append(f"{documents} documents are more than the {MOST_DOCUMENTS} of one packed call")
    return tuple(reasons)


def most_rows(request: Request) -> int:
    """Rows of q or k in one call: of a sample, or of all documents that key padding is packed into."""
    samples = request.q.shape[0] if request.structure_kind == "key_padding" else 1
    return samples * max(request.q.shape[-3], request.k.shape[-3])


def _chip(machine: Machine) -> tuple[str, ...]:
    return ("npu_fusion_attention has no code for 310P, only for A2, A3 and A5",) if machine.arch == "310P" else ()


def _packed_lse(request: Request, machine: Machine) -> tuple[str, ...]:
    """Without softmax_layout the order of a packed call's statistics is not documented."""
    if not request.lse or request.structure_kind not in ("packed", "key_padding") or request.structure_facts.spans:
        return ()
    release, version = machine.versions.get("torch-npu", ""), cann.version_of(machine)
    known = "the order of its packed statistics is stated by softmax_layout"
    reasons = []
    if release and not cann.at_least(release, *TORCH_NPU_ORDERS):
        reasons.append(f"LSE of packed documents: {known}, which torch-npu {release} lacks and 2.9 has")
    if version and not cann.at_least(version, *CANN_ORDERS):
        reasons.append(f"LSE of packed documents: {known}, which CANN 8.3 brought; this is {cann.named(version)}")
    return tuple(reasons)
