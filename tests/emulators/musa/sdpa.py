"""torch_musa's `scaled_dot_product_attention`, over the CPU's: its kernels, its masks, and what it leaves open.

A mask of two axes is [L,S], and if it is not, [N,S], which hides keys of samples: nothing of two axes is broadcast.
Causal is aligned to the first row; of the flash kernel that is known for equal lengths alone. Rows that a mask hides
wholly are NaN, for no source says what muDNN makes of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional

from tests.emulators.musa.mudnn import checked_scale, fits
from tests.emulators.musa.stack import current, lint, require

VERSIONS: dict[str, str] = {}
_kept: list[Any] = []
Tensor = torch.Tensor


def install() -> None:
    """In the place of torch.nn.functional's, before anyone has bound that; once a process, for good."""
    if not _kept:
        _kept.append(torch.nn.functional.scaled_dot_product_attention)
        torch.nn.functional.scaled_dot_product_attention = attend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[B,H,S,D], as torch's own."""
    require(query.dtype != torch.float64, "float64 is not there on MUSA")
    lint(dropout_p == 0.0, "dropout is not emulated")
    require(
        not (is_causal and attn_mask is not None), "MUSA SPDA: Explicit attn_mask should not be set when is_causal=True"
    )
    checked_scale(query, scale)
    kernel = chosen(query, key, value, attn_mask)
    square = query.shape[-2] == key.shape[-2]
    lint(not is_causal or square or kernel == "math", "causal of the flash kernel where lengths differ")
    mask = None if attn_mask is None else full_mask(attn_mask, query, key)
    original = _kept[0] if _kept else torch.nn.functional.scaled_dot_product_attention
    out: Tensor = original(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if mask is None or key.shape[-2] == 0:
        return out
    seen = mask if mask.dtype == torch.bool else ~mask.isneginf()
    return out.masked_fill(~seen.any(-1, keepdim=True), float("nan"))


def chosen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """ "flash" or "math" """
    flash = (
        current().capability >= (2, 2)
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == key.dim() == value.dim()
        and query.dim() in (3, 4)
        and fits(query.shape[-1], value.shape[-1])
        and not (mask is not None and mask.requires_grad)
    )
    return "flash" if flash else "math"


def full_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as muDNN reads it, in a form that torch reads alike."""
    require(
        mask.dtype in (torch.bool, query.dtype),
        f"Expected attn_mask dtype to be bool or to match query dtype, but got {mask.dtype}",
    )
    rows, keys, batch = query.shape[-2], key.shape[-2], query.shape[0]
    if mask.dim() == 2:
        if tuple(mask.shape) == (rows, keys):
            return mask
        require(
            tuple(mask.shape) == (batch, keys), "MUSA SPDA: shape of 2D attn_mask should be [L, S] or [N, S]."
        )  # fmt: skip
        return mask[:, None, None, :]
    full = (query.shape[1], rows, keys) if mask.dim() == 3 else (batch, query.shape[1], rows, keys)
    require(mask.dim() in (3, 4), "MUSA SPDA: attn_mask should be 2/3/4D Tensor.")
    fitting = all(size in (1, wanted) for size, wanted in zip(mask.shape, full, strict=True))
    require(fitting, f"MUSA SPDA: shape of {mask.dim()}D attn_mask should be expandable to {list(full)}")
    return mask
