"""Attention under a mask: a boolean or additive one given as such, or what a `Visibility` says, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from polyattn.backends.band import joined
from polyattn.backends.calls import Kernel, Result, written
from polyattn.backends.derived import derived
from polyattn.backends.visibility import Visibility, Window, of_positions
from polyattn.structures.host_data import on_host
from polyattn.structures.mask import MaskMeta, mask_meta

#: Mask entries made at once.
_ENTRIES = 1 << 24


@dataclass(frozen=True)
class Blank:
    """What is set to 0 before the kernel sees it, since 0 * NaN is NaN: None where nothing is, or nobody knows.

    rows  bool [B|1,Sq,H|1,1], keys  bool [B|1,Sk,Hk|1,1]: what sees nothing, and what nothing sees
    """

    rows: torch.Tensor | None
    keys: torch.Tensor | None


def masked(
    attend: Kernel,
    bias_dtype: Callable[[torch.dtype], torch.dtype],
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
    """A slot for "mask" and "bias" over `attend`; `bias_dtype` says which dtype its additive masks want beside q's."""
    meta, q, k, v = under_positions(meta, q, k, v, causal, window)
    mask, peak = (meta.keep, None) if meta.keep is not None else _bias(meta, bias_dtype(q.dtype))
    result, lse = attend(q, k, v, mask=mask, causal=False, scale=scale, softcap=softcap, need_lse=need_lse)
    if peak is not None and lse is not None:
        lse = lse + peak
    return written(out, result), lse


def under_positions(
    meta: MaskMeta, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: Window
) -> tuple[MaskMeta, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mask with causal and a window in it, the same object each time; q, k, v with 0 where nothing reaches."""
    meta = with_positions(meta, q.shape[1], k.shape[1], causal, window)
    blank = _blank(meta, q.shape[2] // k.shape[2])
    if blank.rows is not None:
        q = q.masked_fill(blank.rows, 0.0)
    if blank.keys is not None:
        k, v = k.masked_fill(blank.keys, 0.0), v.masked_fill(blank.keys, 0.0)
    return meta, q, k, v


def by_visibility(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    visibility: Visibility,
    scale: float,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Attention of q [B,Sq,H,D] that sees what `visibility` says; the mask exists for one block of rows at a time."""
    blind = visibility.blind_rows
    hidden = over_heads(visibility.seen_keys.logical_not())
    q, k, v = q.masked_fill(over_heads(blind), 0.0), k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    rows = max(1, _ENTRIES // max(1, visibility.first.shape[0] * visibility.keys))
    one = rows >= visibility.first.shape[1]
    blocks = [(0, q.shape[1])] if one else _blocks(q.shape[1], rows)
    pieces = [
        attend(
            q.narrow(1, start, stop - start), k, v, mask=visibility.pairs if one else visibility.rows(start, stop),
            causal=False, scale=scale, softcap=softcap, need_lse=need_lse,
        )
        for start, stop in blocks
    ]  # fmt: skip
    result, lse = joined(pieces)
    if visibility.asked is not None:
        result = result.masked_fill(over_heads(blind), 0.0)
        lse = None if lse is None else lse.masked_fill(blind.unsqueeze(1), float("-inf"))
    return written(out, result), lse


def over_heads(rows: torch.Tensor) -> torch.Tensor:
    """[B,S] as [B,S,1,1], for tensors [B,S,H,D]."""
    return rows.unsqueeze(-1).unsqueeze(-1)


def with_positions(meta: MaskMeta, queries: int, keys: int, causal: bool, window: Window) -> MaskMeta:
    """The mask with causal and a window put into it, once for all layers."""
    if not causal and window is None:
        return meta

    def build() -> MaskMeta:
        seen = of_positions(queries, keys, causal, window, meta.tensor.device).mask
        if meta.keep is not None:
            return mask_meta(meta.keep & seen)
        return mask_meta(meta.tensor.where(seen, float("-inf")))

    return derived(meta, ("positions", queries, keys, causal, window), build)


def _blocks(queries: int, rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + rows, queries)) for start in range(0, queries, rows)]


def _blank(meta: MaskMeta, group: int) -> Blank:
    """Rows and keys that nothing reaches. A mask on a device is reduced only as far as its structure did."""
    tensor = meta.tensor.detach()
    if not on_host(tensor):
        keys = None if meta.visible_keys is None else over_heads(meta.visible_keys.logical_not())
        return Blank(None, keys)

    def build() -> Blank:
        keep = meta.keep if meta.keep is not None else tensor.isneginf().logical_not()
        keys = keep.any(dim=2)
        if keys.shape[1] > 1:  # a KV head's keys are seen by the query heads that share it
            keys = keys.unflatten(1, (-1, group)).any(dim=2)
        return Blank(_unseen(keep.any(dim=3)), _unseen(keys))

    return derived(meta, ("blank", group), build)


def _unseen(seen: torch.Tensor) -> torch.Tensor | None:
    """[B,H,S] -> what is not seen, [B,S,H,1]; None if all is."""
    hidden = seen.logical_not().transpose(1, 2).unsqueeze(-1)
    return hidden if bool(hidden.any()) else None


def _bias(meta: MaskMeta, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The additive mask in `dtype` without what was taken off each row of it, and that, [B|1,H|1,Sq|1].

    A softmax does not see what all of a row has in common, but scores lose their digits beside a large entry. So each
    row loses its largest one: near 0, where entries count, `dtype` need not hold the mask's range or digits either. A
    finite entry stays finite, so that it never hides a key by overflow.
    """
    assert meta.bias is not None
    bias = meta.bias

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        wide = bias.to(torch.promote_types(torch.promote_types(bias.dtype, dtype), torch.float32))
        peak = wide.detach().amax(dim=-1, keepdim=True)
        peak = peak.masked_fill(peak.isneginf(), 0.0)  # a row that sees nothing
        near = (wide - peak).clamp(min=torch.finfo(dtype).min).to(dtype)
        return near.masked_fill(bias.detach().isneginf(), float("-inf")), peak.squeeze(-1).float()

    return build() if bias.requires_grad else derived(meta, ("bias", dtype), build)
