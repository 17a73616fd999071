"""What the core's own slots do: one set of features a structure, shared by the platforms that bind them."""

from __future__ import annotations

from polyattn.door.backend import Features, Slot
from polyattn.door.platform import Machine
from polyattn.door.request import Request

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

#: Absolute error against float64 on unit-normal inputs.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

#: Slot function -> structure kinds, whether it takes a window. In the order in which slots are listed.
_STRUCTURES: dict[str, tuple[frozenset[str], bool]] = {
    "dense": (frozenset({"dense"}), True),
    "prefix_kv": (frozenset({"prefix_kv"}), True),
    "key_padding": (frozenset({"key_padding"}), True),
    "mask": (frozenset({"mask", "bias"}), True),
    "packed": (frozenset({"packed"}), True),
    "spans": (frozenset({"spans"}), False),
    "packed_spans": (frozenset({"packed", "spans"}), False),
    "paged": (frozenset({"paged"}), True),
    "paged_spans": (frozenset({"paged", "spans"}), False),
}
#: Block-sparse slots: no positions, no softcap; gathering their keys is deterministic, its gradient need not be.
_SPARSE = ("video_tiles", "block_map")


def slots(
    module: str,
    prefix: str,
    *,
    lse: bool,
    softcap: bool = False,
    mask_grad: bool = False,
    deterministic: bool,
    gathers_in_order: bool = False,
    bind: str = "",
) -> tuple[Slot, ...]:
    """The slots `module:<prefix>_<structure>`, each with causal, GQA, any head dims, gradients and `out`.

    `bind`: what binds the dense one to a shape, "module:function". `gathers_in_order`: the gradient of gathered rows is
    summed in the same order each time.
    """
    sparse = tuple(
        Slot(
            f"{module}:{prefix}_{kind}",
            Features(
                kinds=frozenset({kind}), lse=lse, gqa=True, v_dim=True, backward=True, deterministic=gathers_in_order,
                out=True, dtypes=FLOATS,
            ),
        )
        for kind in _SPARSE
    )  # fmt: skip
    dense = tuple(
        Slot(
            f"{module}:{prefix}_{name.partition('_spans')[0]}",
            Features(
                kinds=kinds, causal=True, window=window, softcap=softcap, lse=lse, gqa=True, v_dim=True, backward=True,
                mask_grad=mask_grad and name == "mask", deterministic=deterministic, out=True, dtypes=FLOATS,
            ),
            bind if name == "dense" else "",
        )
        for name, (kinds, window) in _STRUCTURES.items()
    )  # fmt: skip
    return dense + sparse


def host_lengths_only(request: Request, machine: Machine) -> tuple[str, ...]:
    """Against documents and pages whose lengths only the device knows: piecewise forwards would have to read them."""
    facts = request.structure_facts
    if facts.host or request.structure_kind not in ("packed", "paged"):
        return ()
    what = "document boundaries" if request.structure_kind == "packed" else "the block table or lengths"
    return (f"{what} are on the device only, and it runs piece by piece: give them on the host",)


def no_spans_in_unknown_pages(request: Request, machine: Machine) -> tuple[str, ...]:
    """Against spans beside a block table that only the device knows."""
    facts = request.structure_facts
    if facts.host or not facts.spans or request.structure_kind != "paged":
        return ()
    return ("spans in pages need the block table and the lengths on the host",)
