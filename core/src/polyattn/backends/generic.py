"""Slots for devices that nobody owns, and a vendor's first honest backends: torch's SDPA and plain matmul.

Nothing here reads a tensor on the host or knows a kernel by name; what SDPA does not give (LSE, softcap, gradients of a
mask, lengths that only the device knows) is `blocked`'s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from polyattn.backends import blocked, fused, lengths
from polyattn.backends.band import banded
from polyattn.backends.block_sparse import block_map
from polyattn.backends.declarations import TOLERANCES, host_lengths_only, no_spans_in_unknown_pages, slots
from polyattn.backends.masked import masked
from polyattn.backends.video import video_tiles
from polyattn.compositions.loop import document_loop
from polyattn.compositions.segments import spans
from polyattn.compositions.slice import prefix
from polyattn.door.backend import Backend


def _own_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


sdpa_dense = partial(banded, fused.portable)
sdpa_prefix_kv = partial(prefix, sdpa_dense)
sdpa_key_padding = partial(lengths.key_padding, sdpa_dense, fused.portable)
sdpa_mask = partial(masked, fused.portable, _own_dtype)
sdpa_packed = partial(document_loop, sdpa_dense)
sdpa_spans = partial(spans, sdpa_dense)
sdpa_paged = partial(lengths.paged, sdpa_dense, fused.portable)
sdpa_video_tiles = partial(video_tiles, fused.portable)
sdpa_block_map = partial(block_map, fused.portable)

blocked_dense = partial(banded, blocked.attend)
blocked_prefix_kv = partial(prefix, blocked_dense)
blocked_key_padding = partial(lengths.key_padding, blocked_dense, blocked.attend)
blocked_mask = partial(masked, blocked.attend, blocked.compute_dtype)
blocked_packed = partial(lengths.packed, blocked_dense, blocked.attend)
blocked_spans = partial(spans, blocked_dense)
blocked_paged = partial(lengths.paged, blocked_dense, blocked.attend)
blocked_video_tiles = partial(video_tiles, blocked.attend)
blocked_block_map = partial(block_map, blocked.attend)

SDPA = Backend(
    "sdpa",
    # which kernel runs is torch's choice
    slots(__name__, "sdpa", lse=False, deterministic=False, bind="polyattn.backends.fused:bound_portable"),
    check=host_lengths_only,
    tolerances=TOLERANCES,
)
BLOCKED = Backend(
    "blocked",
    slots(__name__, "blocked", lse=True, softcap=True, mask_grad=True, deterministic=True),
    check=no_spans_in_unknown_pages,
    tolerances=TOLERANCES,
)
BACKENDS: tuple[Backend, ...] = (SDPA, BLOCKED)


def generic_backends(dtypes: frozenset[str] | None = None) -> tuple[Backend, ...]:
    """`sdpa` and `blocked` for any device of torch; `dtypes` are those that the device computes in (None: all theirs).

    >>> [backend.name for backend in generic_backends()]
    ['sdpa', 'blocked']
    >>> sdpa, _ = generic_backends(frozenset({"float16"}))
    >>> {slot.features.dtypes for slot in sdpa.slots}
    {frozenset({'float16'})}
    """
    return BACKENDS if dtypes is None else tuple(_computing_in(dtypes, backend) for backend in BACKENDS)


def _computing_in(dtypes: frozenset[str], backend: Backend) -> Backend:
    features = [replace(slot.features, dtypes=slot.features.dtypes & dtypes) for slot in backend.slots]
    slots = tuple(replace(slot, features=known) for slot, known in zip(backend.slots, features, strict=True))
    return replace(backend, slots=slots)
