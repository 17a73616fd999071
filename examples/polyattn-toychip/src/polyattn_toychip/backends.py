"""What toychip can do, as data: each slot with the features that it really has. Nothing here runs."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Slot, generic_backends, varlen_padding

#: What the maker's kernel takes; all that is not named is "no", and refused with that reason.
_KERNEL = Features(
    causal=True,
    lse=True,
    deterministic=True,
    dtypes=frozenset({"float32", "bfloat16"}),
    head_dims=range(16, 129, 16),
)


def _slot(kind: str) -> Slot:
    return Slot(f"polyattn_toychip.rows:{kind}", replace(_KERNEL, kinds=frozenset({kind})))


#: The kernel, bound to three structures.
ROWS = Backend(
    "rows",
    slots=(_slot("dense"), _slot("packed"), _slot("key_padding")),
    check=varlen_padding.packs_in_place,  # what features cannot say: padding that packing would move under causal
    tolerances={"float32": 2e-5, "bfloat16": 3e-2},
)


#: The core's plain matmul and softmax, for what the kernel lacks: masks, windows, gradients, pages.
(BLOCKED,) = (backend for backend in generic_backends(_KERNEL.dtypes) if backend.name == "blocked")

BACKENDS: tuple[Backend, ...] = (ROWS, BLOCKED)
