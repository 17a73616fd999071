"""A correct backend in plain torch, which each planted one gets wrong in a single place.

Its entry point is `backend`; a planted module replaces one of the steps below.
"""

from __future__ import annotations

from polyattn.vendor import Backend, Features, Slot

CLAIMS = Features(
    kinds=frozenset({"dense", "prefix_kv", "key_padding", "mask", "bias", "packed"}),
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
    dtypes=frozenset({"float32"}),
)


def planted(module: str) -> Backend:
    """The backend whose forward is `attend` in this module, with all the claims of the honest one."""
    return Backend(module.removeprefix("planted_"), (Slot(f"{module}:attend", CLAIMS),))


def backend() -> Backend:
    return Backend("honest", (Slot("planted_steps:attend", CLAIMS),))
