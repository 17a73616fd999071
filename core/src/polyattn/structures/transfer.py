"""The way of derived data to a device: never for the first time inside a graph capture."""

from __future__ import annotations

import torch


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; RuntimeError where that would need a transfer inside a graph capture."""
    if tensor.device == device:
        return tensor
    refuse_in_capture(device)
    return tensor.to(device)


def refuse_in_capture(device: torch.device) -> None:
    """RuntimeError while a graph is captured on `device`: what is derived then has no content until the replay."""
    if is_capturing(device):
        raise RuntimeError(
            f"a structure derives data for {device} for the first time inside a graph capture: call "
            f"structure.to({str(device)!r}) before the capture, and run the call once (pa.warmup) where it needs more"
        )


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a graph; False where graphs do not exist."""
    if device.type in ("cpu", "meta"):
        return False
    module = getattr(torch, device.type, None)
    initialized = getattr(module, "is_initialized", None)
    capturing = getattr(module, "is_current_stream_capturing", None)
    if capturing is None or (initialized is not None and not initialized()):
        return False
    return bool(capturing())
