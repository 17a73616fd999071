"""Documents that strange values behind their end spoiled, computed anew. Loaded on first use: it needs Triton."""

from __future__ import annotations

from typing import Any


def repair_samples(*tensors: Any, **call: Any) -> None:
    """As `polyattn.vendor.repair_samples`."""
    from polyattn.vendor import repair_samples

    repair_samples(*tensors, **call)


def repair_documents(*tensors: Any, **call: Any) -> None:
    """As `polyattn.vendor.repair_documents`."""
    from polyattn.vendor import repair_documents

    repair_documents(*tensors, **call)
