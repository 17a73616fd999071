"""The CPU's slots: the shared forwards over its flash kernel (`sdpa`), then plain matmul as everywhere (`blocked`)."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from polyattn.backends import fused, lengths
from polyattn.backends.band import banded
from polyattn.backends.block_sparse import block_map
from polyattn.backends.calls import Result
from polyattn.backends.declarations import FLOATS, TOLERANCES, host_lengths_only, slots
from polyattn.backends.generic import BLOCKED
from polyattn.backends.masked import masked
from polyattn.backends.video import video_tiles
from polyattn.compositions.loop import document_loop
from polyattn.compositions.segments import spans
from polyattn.compositions.slice import prefix
from polyattn.door.backend import Backend, Features, Slot


def sdpa_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Dense attention without anything else, one call of torch away."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:  # the flash kernel wants dense last axes
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=scale).transpose(1, 2), None


def _flash_bias(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


sdpa_dense = partial(banded, fused.cpu)
sdpa_prefix_kv = partial(prefix, sdpa_dense)
sdpa_key_padding = partial(lengths.key_padding, sdpa_dense, fused.cpu)
sdpa_mask = partial(masked, fused.cpu, _flash_bias)
sdpa_packed = partial(document_loop, sdpa_dense)
sdpa_spans = partial(spans, sdpa_dense)
sdpa_paged = partial(lengths.paged, sdpa_dense, fused.cpu)
sdpa_video_tiles = partial(video_tiles, fused.cpu)
sdpa_block_map = partial(block_map, fused.cpu)

_PLAIN = Slot(f"{__name__}:sdpa_plain", Features(backward=True, deterministic=True, dtypes=FLOATS))

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "sdpa",
        (_PLAIN, *slots(__name__, "sdpa", lse=True, deterministic=True, gathers_in_order=True)),
        check=host_lengths_only,
        tolerances=TOLERANCES,
    ),
    BLOCKED,
)
