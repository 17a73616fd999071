"""Slots over samples [B,S,H,D] for torch-npu's two ops, which take causal, windows and masks in the same terms.

`attend` is the op as `Attend` describes it. What it takes beside q, k, v has one name in both, but a window's sides.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from polyattn.vendor import MaskMeta, Result, Window, derived, empty_attention, positive_scale, under_positions, written
from polyattn_npu.bands import WindowArgs, band_of, sparse_mode_args, window_sides
from polyattn_npu.bias import before_scale, room_for_bias

#: `inner_precise`: a row whose mask hides every key gives 0, else the mean of V.
EMPTY_ROWS_ARE_ZERO = 2
NEG_INF = float("-inf")


class Attend(Protocol):
    """An op on samples [B,S,H,D]: out [B,Sq,H,Dv], lse [B,H,Sq] | None, some number where a row has no key."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, need_lse: bool, **op_args: Any
    ) -> Result: ...


def dense(
    attend: Attend,
    names: WindowArgs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Every query over every key, causal or in a window, whose sides may be negative here."""
    no_softcap(softcap)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    left, right = window_sides(causal, window)
    if left is None and (right is None or right == 0):
        result, lse = _plain_or_causal(attend, names, q, k, v, right, scale, need_lse)
    else:
        result, lse = _in_band(attend, names, q, k, v, left, right, scale, need_lse)
    return written(out, result), lse


def _plain_or_causal(
    attend: Attend,
    names: WindowArgs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    right: int | None,
    scale: float,
    need_lse: bool,
) -> Result:
    """Plain or causal. The op itself zeroes fully masked rows, the first ones of more queries than keys."""
    queries, keys = q.shape[1], k.shape[1]
    masked_rows = 0 if right is None else max(0, queries - keys)
    op_args = sparse_mode_args(queries, keys, None, right, q.device, names)
    if masked_rows:
        op_args["inner_precise"] = EMPTY_ROWS_ARE_ZERO
    result, lse = attend(q, k, v, scale=scale, need_lse=need_lse, **op_args)
    if masked_rows and lse is not None:
        lse.narrow(2, 0, masked_rows).fill_(NEG_INF)
    return result, lse


def _in_band(
    attend: Attend,
    names: WindowArgs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    left: int | None,
    right: int | None,
    scale: float,
    need_lse: bool,
) -> Result:
    """A window, of the rows with a key and the keys that some row sees: 0 times a hidden NaN would be NaN."""
    queries = q.shape[1]
    band = band_of(queries, k.shape[1], left, right)
    if band is None:
        return empty_attention(q, k, v, need_lse)
    result, lse = attend(
        q.narrow(1, band.q_start, band.queries), k.narrow(1, band.k_start, band.keys),
        v.narrow(1, band.k_start, band.keys), scale=scale, need_lse=need_lse,
        **sparse_mode_args(band.queries, band.keys, band.left, band.right, q.device, names),
    )  # fmt: skip
    if band.queries < queries:
        around = (band.q_start, queries - band.q_stop)
        result = pad(result, (0, 0, 0, 0, *around))
        lse = None if lse is None else pad(lse, around, value=NEG_INF)
    return result, lse


def mask(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: MaskMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot for "mask" and "bias". What the op takes of them is made once for all layers: the mask inverted, whole."""
    no_softcap(softcap)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    meta, q, k, v = under_positions(meta, q, k, v, causal, window)
    batch, queries, heads = q.shape[:3]
    hidden = derived(meta, ("hidden", batch, queries, heads), lambda: _hidden(meta, batch, queries, heads))
    op_args: dict[str, Any] = {"atten_mask": hidden, "sparse_mode": 1, "inner_precise": EMPTY_ROWS_ARE_ZERO}
    added = None
    if meta.bias is not None:
        bias = meta.bias.detach()
        q, scale = room_for_bias(q, scale)
        size = (batch, heads, queries)
        added = derived(meta, ("pse", *size, scale, q.dtype), lambda: before_scale(bias, size, scale, q.dtype))
        op_args["pse"] = added.pse
    result, lse = attend(q, k, v, scale=scale, need_lse=need_lse, **op_args)
    if lse is not None:
        lse = lse if added is None else lse + added.peak
        lse = lse.masked_fill(
            derived(meta, ("fully masked", batch, queries, heads), lambda: hidden.all(dim=-1)), NEG_INF
        )
    return written(out, result), lse


def _hidden(meta: MaskMeta, batch: int, queries: int, heads: int) -> torch.Tensor:
    """Bool, True hides, in a shape that the op takes: [1,1,Sq,Sk], [B,1,Sq,Sk] or [B,H,Sq,Sk]."""
    hidden = meta.keep.logical_not() if meta.keep is not None else meta.tensor.detach().isneginf()
    every_head = hidden.shape[1] > 1
    samples = batch if every_head else hidden.shape[0]
    return hidden.expand(samples, heads if every_head else 1, queries, -1).contiguous()


def no_softcap(softcap: float) -> None:
    """ValueError for one: features refuse it before."""
    if softcap:
        raise ValueError(f"Ascend's attention ops take no softcap, asked {softcap}")
