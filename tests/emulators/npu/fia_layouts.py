"""Layouts of npu_fused_infer_attention_score: one for the inputs, maybe another for the output, and their shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: input_layout -> (the inputs', the output's).
LAYOUTS = {name: (name, name) for name in ("BSH", "BSND", "BNSD", "TND", "NTD")} | {
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "NTD_TND": ("NTD", "TND"),
    "TND_NTD": ("TND", "NTD"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "NSD": ("NSD", "NSD"),
}
#: Those that the emulator does not answer.
UNANSWERED = ("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "NSD")
PACKED = ("TND", "NTD")


class Shapes(NamedTuple):
    """Of the results."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def facts_of(q: torch.Tensor, v: torch.Tensor, layout: str, heads: int, kv_heads: int, paged: bool) -> Shapes:
    """Shapes of the output and of the LSE."""
    taken, given = LAYOUTS[layout]
    flat_cache = paged and v.dim() == 3
    v_dim = v.shape[2] // kv_heads if flat_cache or taken == "BSH" else v.shape[-1]
    if taken in PACKED:
        rows = q.shape[0 if taken == "TND" else 1]
        return Shapes((rows, heads, v_dim) if given == "TND" else (heads, rows, v_dim), (rows, heads, 1))
    batch, rows = (1, q.shape[1]) if taken == "NSD" else (q.shape[0], q.shape[2 if taken == "BNSD" else 1])
    shape = {
        "BSH": (batch, rows, heads * v_dim),
        "BSND": (batch, rows, heads, v_dim),
        "BNSD": (batch, heads, rows, v_dim),
        "NBSD": (heads, batch, rows, v_dim),
        "NSD": (heads, rows, v_dim),
    }[given]
    return Shapes(shape, (batch, heads, rows, 1))
