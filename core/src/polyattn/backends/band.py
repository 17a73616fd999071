"""Dense attention with causal and windows, bottom-right aligned for any Sq and Sk: only the band is computed."""

from __future__ import annotations

import torch

from polyattn.backends.calls import Kernel, Result, written
from polyattn.backends.empty import empty_attention

#: Query rows computed at once: few enough to skip most of what the band hides, enough to keep a kernel busy. On the CPU
#: 256 are fastest beside a single edge, and 64 in a window (by up to 2.5x).
_ROWS = 256
_WINDOW_ROWS = 64


def banded(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A dense slot over `attend`. A window's sides may be negative here: keys past, or short of, the diagonal."""
    queries, keys = q.shape[1], k.shape[1]
    left, right = (None, None) if window is None else window
    if causal:
        right = 0
    left = None if left is not None and left >= keys - 1 else left
    right = None if right is not None and right >= queries - 1 else right
    if left is None and right is None:
        result, lse = attend(q, k, v, mask=None, causal=False, scale=scale, softcap=softcap, need_lse=need_lse)
    elif left is None and right == 0 and queries == keys:
        result, lse = attend(q, k, v, mask=None, causal=True, scale=scale, softcap=softcap, need_lse=need_lse)
    else:
        result, lse = _in_blocks(attend, q, k, v, left, right, scale, softcap, need_lse)
    return written(out, result), lse


def _in_blocks(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    need_lse: bool,
) -> Result:
    queries, keys = q.shape[1], k.shape[1]
    first, stop = live_rows(queries, keys, left, right)
    shift = keys - queries
    pieces: list[Result] = []
    if first > 0:
        pieces.append(empty_attention(q.narrow(1, 0, first), k, v, need_lse))
    if left is None and right == 0 and stop - first == keys:  # more queries than keys: those that see any are a square
        pieces.append(
            attend(
                q.narrow(1, first, keys),
                k,
                v,
                mask=None,
                causal=True,
                scale=scale,
                softcap=softcap,
                need_lse=need_lse,
            )
        )
    else:
        masks: dict[tuple[int, int, int, int], torch.Tensor | None] = {}
        rows = _ROWS if left is None or right is None else _WINDOW_ROWS
        for start in range(first, stop, rows):
            end = min(start + rows, stop)
            low = 0 if left is None else max(0, start + shift - left)
            high = keys if right is None else min(keys, end + shift + right)
            # in the block's own coordinates: row i sees keys i + below .. i + above
            below = start - end if left is None else start + shift - left - low
            above = keys if right is None else start + shift + right - low
            shape = (end - start, high - low, below, above)
            if shape not in masks:
                masks[shape] = _band(*shape, q.device)
            pieces.append(
                attend(
                    q.narrow(1, start, end - start), k.narrow(1, low, high - low), v.narrow(1, low, high - low),
                    mask=masks[shape], causal=False, scale=scale, softcap=softcap, need_lse=need_lse,
                )
            )  # fmt: skip
    if stop < queries:
        pieces.append(empty_attention(q.narrow(1, stop, queries - stop), k, v, need_lse))
    return joined(pieces)


def live_rows(queries: int, keys: int, left: int | None, right: int | None) -> tuple[int, int]:
    """The run [first, stop) of query rows that see a key at all."""
    first = 0 if right is None else min(queries, max(0, queries - keys - right))
    stop = queries if left is None else min(queries, max(0, queries + left))
    if left is not None and right is not None and right < -left:
        stop = first
    return first, max(first, stop)


def joined(pieces: list[Result]) -> Result:
    """Results for successive query rows, as one."""
    if len(pieces) == 1:
        return pieces[0]
    lses = [lse for _, lse in pieces if lse is not None]
    return torch.cat([out for out, _ in pieces], dim=1), torch.cat(lses, dim=2) if lses else None


def _band(rows: int, keys: int, below: int, above: int, device: torch.device) -> torch.Tensor | None:
    """Bool [1,1,rows,keys]: row i sees keys i + below .. i + above; None where each sees all of them."""
    if below + rows - 1 <= 0 and above >= keys - 1:
        return None
    return torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device).triu_(below).tril_(above)
