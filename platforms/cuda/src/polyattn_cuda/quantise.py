"""Quantisation to FP8 by the core's kernels. Loaded on first use: they need Triton."""

from __future__ import annotations

from typing import Any


def batched(*tensors: Any) -> Any:
    """As `polyattn.vendor.quantise_fp8`."""
    from polyattn.vendor import quantise_fp8

    return quantise_fp8(*tensors)


def packed(*tensors: Any) -> Any:
    """As `polyattn.vendor.quantise_fp8_packed`."""
    from polyattn.vendor import quantise_fp8_packed

    return quantise_fp8_packed(*tensors)
