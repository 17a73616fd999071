"""Which packed rows see no key: kernels may answer anything for them, NaN too, and polyattn answers 0."""

from __future__ import annotations

import torch

from polyattn.backends import visibility
from polyattn.backends.visibility import Window
from polyattn.structures.packed_meta import PackedMeta

Lengths = tuple[int, ...]


def blind_rows(queries: int, keys: int, causal: bool, window: Window) -> int:
    """How many of a document's first rows see none of its keys; no others can be blind."""
    right = 0 if causal else None if window is None else window[1]
    return queries if keys == 0 else 0 if right is None else min(queries, max(0, queries - keys - right))


def every_row_sees(queries: Lengths | None, keys: Lengths | None, causal: bool, window: Window) -> bool:
    """Whether the host knows that each row of each document sees a key."""
    if queries is None or keys is None:
        return False
    return not any(blind_rows(asked, kept, causal, window) for asked, kept in zip(queries, keys, strict=True))


def blank_blind(
    result: torch.Tensor,
    lse: torch.Tensor | None,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    keys: int,
    causal: bool,
    window: Window,
) -> None:
    """Rows of result [T,H,D] and lse [H,T] that see none of the `keys` packed keys become 0 and -inf, in place.

    Judged by positions, on the device: a NaN of the caller's own stays one. So become rows past the last boundary.
    """
    documents = PackedMeta(cu_q, cu_k, 0, 0, None, None, None)
    blind = visibility.of_packed(documents, result.shape[0], keys, causal, window).blind_rows.squeeze(0)
    result.masked_fill_(blind.reshape(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(blind, float("-inf"))
