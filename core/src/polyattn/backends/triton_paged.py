"""Slots of the portable Triton backend for paged keys and values; importable without Triton."""

from __future__ import annotations

import torch

from polyattn.backends.calls import Result
from polyattn.backends.derived import derived
from polyattn.door.backend import Features, Slot
from polyattn.structures.intervals import Intervals
from polyattn.structures.paged import PagedMeta
from polyattn.structures.transfer import send


def paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """q [B,Sq,H,D], padded or not, or packed [T,H,D]; k, v are pools. Tables and lengths may be the device's alone.

    Rows with spans are causal outside of them, whatever `causal` says.
    """
    from polyattn.kernels.paged_attention import Pages, paged_attention  # Triton, on first use

    pages = Pages(
        meta.block_table,
        meta.kv_lengths,
        meta.q_lengths,
        None if meta.spans is None else derived(meta, "visible ends", lambda: _ends_on_device(meta)),
        None if meta.host_q is None else max(meta.host_q, default=0),
        None if meta.host_kv is None else max(meta.host_kv, default=0),
    )
    return paged_attention(
        q, k, v, out, pages, causal=causal and meta.spans is None, scale=scale, window=window, softcap=softcap,
        need_lse=need_lse,
    )  # fmt: skip


def _ends_on_device(meta: PagedMeta) -> torch.Tensor:
    assert meta.spans is not None
    assert meta.host_kv is not None  # spans are refused without it
    return send(visible_ends(meta.spans, max(meta.host_kv, default=0)), meta.block_table.device)


def visible_ends(spans: tuple[Intervals, ...], width: int) -> torch.Tensor:
    """int32 [B,width]: the query at position p of row b sees the keys before ends[b,p].

    >>> visible_ends((((1, 3),),), 4).tolist()
    [[1, 3, 3, 4]]
    """
    ends = torch.arange(1, width + 1, dtype=torch.int32, device="cpu").repeat(len(spans), 1)
    for row, pairs in enumerate(spans):
        for start, end in pairs:
            ends.select(0, row).narrow(0, start, end - start).fill_(end)
    return ends


_ALL = Features(
    kinds=frozenset({"paged"}), causal=True, window=True, softcap=True, lse=True, gqa=True, v_dim=True,
    deterministic=True, out=True, capture=True, dtypes=frozenset({"float16", "bfloat16", "float32"}),
    head_dims=range(1, 513),
)  # fmt: skip
_WITH_SPANS = Features(
    kinds=frozenset({"paged", "spans"}), causal=True, softcap=True, lse=True, gqa=True, v_dim=True,
    deterministic=True, out=True, capture=True, dtypes=_ALL.dtypes, head_dims=_ALL.head_dims,
)  # fmt: skip

SLOTS: tuple[Slot, ...] = (Slot(f"{__name__}:paged", _ALL), Slot(f"{__name__}:paged", _WITH_SPANS))
