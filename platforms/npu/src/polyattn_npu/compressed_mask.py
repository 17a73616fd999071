"""The one mask that the sparse modes for causal and windows take, whatever the lengths; made once a device."""

from __future__ import annotations

from functools import lru_cache

import torch

SIDE = 2048
_fake_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def compressed_mask(device: torch.device) -> torch.Tensor:
    """Bool [2048,2048], True above the diagonal. All calls on a device share it: nobody writes into it."""
    return _made(device) if _fake_mode(_FAKE) is not None else _kept(device)


def _made(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(SIDE, SIDE, dtype=torch.bool, device="cpu").triu_(1).to(device)


_kept = lru_cache(maxsize=64)(_made)  # 4 MiB each
