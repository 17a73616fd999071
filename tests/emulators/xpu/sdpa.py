"""torch's `scaled_dot_product_attention` as XPU builds have it, over the CPU's: what they leave open is poisoned.

Causal is aligned to the first row. Rows that a mask hides wholly are NaN here, since no source says what oneDNN makes
of them; a mask's dtype is q's or bool; dropout is refused, as no fused kernel takes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional

from tests.emulators.xpu.stack import current, lint, require

VERSIONS: dict[str, str] = {}
#: torch-xpu-ops issue 5224: with more float32 scores the device is lost.
MOST_FLOAT32_SCORES = 2**30
#: torch-xpu-ops issue 5179, pytorch issue 192158: with so few keys, at times rows of the output are left unwritten.
FEW_KEYS = 16
_kept: list[Any] = []


def install() -> None:
    """In the place of torch.nn.functional's, before anyone has bound that; once a process, for good."""
    if not _kept:
        _kept.append(torch.nn.functional.scaled_dot_product_attention)
        torch.nn.functional.scaled_dot_product_attention = attend


def _original() -> Any:
    return _kept[0] if _kept else torch.nn.functional.scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[B,H,S,D], as torch's own."""
    require(query.dtype != torch.float64, "float64 is not there on every XPU")
    lint(dropout_p == 0.0, "dropout leaves every fused kernel of XPU")
    lint(not (is_causal and attn_mask is not None), "causal beside a mask: documented as an error, and not checked")
    if attn_mask is not None:
        require(
            attn_mask.dtype in (torch.bool, query.dtype),
            f"Expected attn_mask dtype to be bool or to match query dtype, but got {attn_mask.dtype}",
        )
    scores = query.shape[:-1].numel() * key.shape[-2]
    require(
        query.dtype != torch.float32 or scores <= MOST_FLOAT32_SCORES,
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    )
    out: torch.Tensor = _original()(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if current().unlucky and 0 < key.shape[-2] <= FEW_KEYS:
        out = out.clone()
        out[..., -1:, :] = float("nan")
    if attn_mask is None or key.shape[-2] == 0:
        return out
    seen = attn_mask if attn_mask.dtype == torch.bool else ~attn_mask.isneginf()
    return out.masked_fill(~seen.any(-1, keepdim=True), float("nan"))


def chosen(query: torch.Tensor, value: torch.Tensor, *, mask: bool, causal: bool, square: bool, grad: bool) -> str:
    """The kernel that an XPU build takes: "flash", "onednn" or "math"."""
    fused, dim = current().fused, query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    flash = fused.flash and half and not mask and dim == value.shape[-1] <= fused.flash_head_dim
    if flash and (square or not causal) and not torch.are_deterministic_algorithms_enabled():
        return "flash"
    grouped = grad and query.shape[1] != value.shape[1]
    return "onednn" if dim <= fused.onednn_head_dim and not grouped else "math"
