"""`npu_fused_infer_attention_score`, torch-npu's attention for inference: what it takes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Requires, Slot, TensorFacts, varlen_padding
from polyattn_npu.op_limits import ARCHS, HALVES, HINT, MOST_HEADS, MOST_ROWS, not_on_this_chip

HEAD_DIMS = range(16, 513, 16)
#: Of what its prompt and its decode kernel take, what is undisputed.
PAGE_SIZES = range(128, 513, 128)
#: Query heads that share a KV head, numbers in a row of all heads, keys of one query, that it takes at most.
MOST_SHARING, MOST_IN_A_ROW, MOST_KEYS_OF_ONE = 64, 65535, 262144

_SAMPLES, _PACKED, _PAGED = (f"polyattn_npu.fia_{room}" for room in ("forward", "packed", "paged"))
#: A slot and the kinds that it takes; those over pages know no windows: with one query the op ignores them.
_SLOTS = (
    (f"{_SAMPLES}:dense", frozenset({"dense"})),
    (f"{_SAMPLES}:prefix_kv", frozenset({"prefix_kv"})),
    (f"{_SAMPLES}:key_padding", frozenset({"key_padding"})),
    (f"{_PACKED}:packed", frozenset({"packed"})),
    (f"{_SAMPLES}:mask", frozenset({"mask"})),
    (f"{_SAMPLES}:spans", frozenset({"spans"})),
    (f"{_PACKED}:packed_spans", frozenset({"packed", "spans"})),
)
_OVER_PAGES = (
    (f"{_PAGED}:paged", frozenset({"paged"})),
    (f"{_PAGED}:paged_spans", frozenset({"paged", "spans"})),
)


def backend() -> Backend:
    """`npu:fia`. It has no gradients."""
    features = Features(causal=True, window=True, lse=True, gqa=True, out=True, dtypes=HALVES, head_dims=HEAD_DIMS)
    over_pages = replace(features, window=False, page_sizes=PAGE_SIZES)
    slots = [
        Slot(call, replace(known, kinds=kinds))
        for known, named in ((features, _SLOTS), (over_pages, _OVER_PAGES))
        for call, kinds in named
    ]
    return Backend(
        "fia",
        tuple(slots),
        requires=(Requires("torch-npu", "", HINT),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features do not say: lengths on the device, padding with holes, some masks and pools, sizes, the chip."""
    return (
        *_aligned_elsewhere(request, machine),
        *_lengths(request),
        *_mask(request),
        *_pool(request),
        *_sizes(request),
        *not_on_this_chip("npu_fused_infer_attention_score", ARCHS, machine),
    )


def _aligned_elsewhere(request: Request, machine: Machine) -> tuple[str, ...]:
    """What packing would move, lengths in place move as well: causal and windows then end on a row's last kept key."""
    if not varlen_padding.packs_in_place(request, machine):
        return ()
    return (
        "causal and windows over lengths are aligned at each row's last kept key, and these queries or this padding "
        "at the last key as passed: npu:fusion takes them under a mask",
    )


def _lengths(request: Request) -> tuple[str, ...]:
    kind, facts = request.structure_kind, request.structure_facts
    if kind in ("key_padding", "packed", "paged") and not facts.host:
        what = "block tables (which it does not check) and lengths" if kind == "paged" else "lengths"
        return (
            f"npu_fused_infer_attention_score takes {what} that the host knows, and only the device knows these: "
            "build the structure from host data, or with check=True, which reads them once",
        )
    if kind == "key_padding" and not facts.prefix:
        return (
            "padding with holes: its lengths say how many first keys a row keeps, and some row keeps others; "
            "npu:fusion packs the kept ones",
        )
    return ()


def _mask(request: Request) -> tuple[str, ...]:
    shape = request.structure_facts.mask_shape
    if request.structure_kind != "mask" or shape is None:
        return ()
    reasons = []
    if shape[1] > 1:
        reasons.append(f"a mask of {shape[1]} heads: it reads one for all heads; npu:fusion takes one for each")
    if request.q.shape[1] == 1:
        reasons.append(
            "a mask for a single query row: it is read up to key 512 alone, without an error; npu:fusion reads all"
        )
    return tuple(reasons)


def _pool(request: Request) -> tuple[str, ...]:
    if request.structure_kind != "paged" or (_is_contiguous(request.k) and _is_contiguous(request.v)):
        return ()
    return ("its kernel reads a contiguous pool [pages,page_size,Hk,D] (PagedKVCache has one); others would be copied",)


def _is_contiguous(pool: TensorFacts) -> bool:
    return pool.stride == TensorFacts.contiguous(pool.shape, pool.dtype).stride


def _sizes(request: Request) -> tuple[str, ...]:
    heads, kv_heads, dim = request.num_heads, request.num_kv_heads, request.head_dim
    reasons = []
    if heads > MOST_HEADS:
        reasons.append(f"{heads} query heads are more than the {MOST_HEADS} of one call: split the heads over calls")
    if heads > MOST_SHARING * kv_heads > 0:
        reasons.append(
            f"{heads} query heads on {kv_heads} KV heads: npu:fusion lets more than {MOST_SHARING} share one"
        )
    if heads * dim > MOST_IN_A_ROW:
        reasons.append(
            f"{heads} heads of {dim} make rows of more than {MOST_IN_A_ROW} numbers: split the heads over calls"
        )
    batched = request.structure_kind not in ("packed", "paged")
    if batched and request.q.shape[1] == 1 and request.k.shape[1] > MOST_KEYS_OF_ONE:
        reasons.append(
            f"{request.k.shape[1]} keys for a single query are more than {MOST_KEYS_OF_ONE}: "
            f"npu:fusion takes {MOST_ROWS}"
        )
    return tuple(reasons)
