"""What the mask and the causal flag of torch's `scaled_dot_product_attention` mean, in polyattn's terms.

torch reads a mask by broadcasting it to [B,H,Sq,Sk] and aligns its triangle top-left; polyattn has one meaning a rank
and aligns bottom-right. A mask over keys alone becomes key padding, which backends run by lengths and not by a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch

from polyattn.integrations.derived import derived
from polyattn.structures import KeyPadding, Mask, Structure

S = TypeVar("S", KeyPadding, Mask)


class Terms(NamedTuple):
    """Arguments of `pa.attention` beside q: k and v hold no more than the keys that some query can see."""

    k: torch.Tensor
    v: torch.Tensor
    structure: Structure | None
    causal: bool


def terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool) -> Terms:
    """What SDPA says with `attn_mask` and `is_causal`, for q, k and v [B,S,H,D]."""
    if attn_mask is not None:
        if is_causal:
            raise ValueError("attn_mask, is_causal: SDPA takes one of them, and not both")
        return Terms(k, v, structure_of(attn_mask, q, k), False)
    rows, keys = q.shape[1], k.shape[1]
    if not is_causal or rows == keys:
        return Terms(k, v, None, is_causal)
    if rows < keys:  # the keys past the last row are nobody's, and the rest is a square
        return Terms(k[:, :rows], v[:, :rows], None, True)
    triangle = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril()
    return Terms(k, v, Mask.pairs(triangle), False)


def structure_of(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Structure:
    """A mask of rank 4 or less as SDPA broadcasts it: bool (True = may attend) or additive.

    One tensor gives one structure for as long as it lives unchanged, so that layers share what is derived from it. A
    mask on a device is not read.
    """
    batch, rows, heads, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    shape = (*(1,) * (4 - mask.dim()), *mask.shape)
    if mask.dim() > 4 or any(
        size not in (1, want) for size, want in zip(shape, (batch, heads, rows, keys), strict=True)
    ):
        raise ValueError(
            f"attn_mask: its shape must broadcast to [B={batch}, H={heads}, Sq={rows}, Sk={keys}], got "
            f"{list(mask.shape)}"
        )
    if mask.requires_grad:  # belongs to one backward
        return Mask(_spread(mask, shape, keys))
    own = mask.detach()  # a tensor of its own, so that what is kept does not keep the mask
    if mask.dtype == torch.bool and shape[1:3] == (1, 1):
        padding = ("key padding", batch, keys)
        return _kept(
            padding, mask, lambda: KeyPadding.from_mask(own.reshape(shape[0], -1).expand(batch, keys), queries="all")
        )
    return _kept(("sdpa mask", keys), mask, lambda: Mask(_spread(own, shape, keys)))


def _spread(mask: torch.Tensor, shape: tuple[int, ...], keys: int) -> torch.Tensor:
    """The mask in rank 4; its last axis is spread, since polyattn's never broadcasts."""
    return mask.reshape(shape).expand(*shape[:3], keys)


def _kept(purpose: Hashable, mask: torch.Tensor, build: Callable[[], S]) -> S:
    # in inference mode a tensor does not say whether it changed, and comparing would read the device once a layer
    if not torch.compiler.is_compiling() and mask.is_inference() and mask.device.type != "cpu":
        return build()
    return derived(purpose, (mask,), build)
