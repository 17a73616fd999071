"""Three fake backends that the door was frozen against, and a machine and requests to ask them with.

Their forwards answer through the reference, so that a route through them can be run and compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.vendor import (
    Backend,
    Features,
    Found,
    Machine,
    Platform,
    Request,
    Requires,
    Slot,
    StructureFacts,
    TensorFacts,
)

HALF = frozenset({"float16", "bfloat16"})
ALL = frozenset({"float16", "bfloat16", "float32", "float64"})

#: Takes dense calls alone, in half precision, in three head sizes.
DENSE_ONLY = Backend(
    "dense_only",
    (Slot("tests.unit.fakes:dense", Features(causal=True, lse=True, dtypes=HALF, head_dims=frozenset({64, 96, 128}))),),
)
#: Takes packed documents alone, at most one of them ([real, pad]).
VARLEN_ONLY = Backend(
    "varlen_only",
    (Slot("tests.unit.fakes:packed", Features(kinds=frozenset({"packed"}), causal=True, dtypes=ALL, max_documents=1)),),
)
#: Takes everything.
EVERYTHING = Backend(
    "everything",
    (
        Slot(
            "tests.unit.fakes:anything",
            Features(
                kinds=frozenset({"dense", "prefix_kv", "key_padding", "mask", "bias", "packed", "spans", "paged"}),
                causal=True,
                window=True,
                softcap=True,
                lse=True,
                gqa=True,
                v_dim=True,
                backward=True,
                mask_grad=True,
                deterministic=True,
                out=True,
                capture=True,
                dtypes=ALL,
                quant=frozenset({"int8"}),
            ),
        ),
    ),
)
#: Would take everything, were its package installed.
ABSENT = replace(EVERYTHING, name="absent", requires=(Requires("toy-kernels", "2.0", "pip install toy-kernels"),))

MACHINE = Machine("toy", "cpu", arch="toy1", versions={"torch": "2.13.0"})


def platform(*backends: Backend, name: str = "toy") -> Platform:
    """A platform of these backends, for CPU tensors."""
    return Platform(name, "cpu", 1, Found, lambda device: MACHINE, backends)


def request(
    *, heads: int = 2, kv_heads: int | None = None, dim: int = 64, dtype: str = "bfloat16", **facts: Any
) -> Request:
    """A dense request of 2 x 8 rows unless told otherwise."""
    q = TensorFacts.contiguous((2, 8, heads, dim), dtype)
    k = TensorFacts.contiguous((2, 8, kv_heads or heads, dim), dtype)
    return replace(Request(q, k, k, scale=dim**-0.5), **facts)


def packed_request(documents: int, **facts: Any) -> Request:
    """A packed request of 12 rows."""
    rows = TensorFacts.contiguous((12, 2, 64), "bfloat16")
    structure = StructureFacts(documents=documents)
    return replace(Request(rows, rows, rows, structure_kind="packed", structure_facts=structure), **facts)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, *, meta: Any, causal: bool, scale: float, **rest: Any
) -> Any:
    """Plain dense attention."""
    from polyattn.reference import reference_attention

    result, lse = reference_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    return result.to(q.dtype), lse.float() if rest["need_lse"] else None
