"""Tensors that depend on a device and a few plain values alone: made once a device, and fit for every later call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec

import torch
from torch._subclasses.fake_tensor import FakeTensor

from polyattn.structures.base import keep
from polyattn.structures.transfer import is_capturing

_P = ParamSpec("_P")
_fake_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def device_constant(limit: int) -> Callable[[Callable[_P, torch.Tensor]], Callable[_P, torch.Tensor]]:
    """For a function of a device and plain values: its `limit` latest results are kept, and nobody writes into one.

    A fake mode takes no real tensor and gets its own, inference mode makes a normal one, and what is made while a graph
    is captured stays that graph's.
    """

    def decorate(build: Callable[_P, torch.Tensor]) -> Callable[_P, torch.Tensor]:
        kept: dict[Hashable, torch.Tensor] = {}

        @wraps(build)
        def constant(*args: _P.args, **named: _P.kwargs) -> torch.Tensor:
            real = _fake_mode(_FAKE) is None
            key = (args, tuple(named.items()))
            if real:
                try:
                    return kept[key]
                except KeyError:
                    pass
            with torch.inference_mode(False):
                made = build(*args, **named)
            if real and not isinstance(made, FakeTensor) and not is_capturing(made.device):
                keep(kept, limit, key, made)
            return made

        return constant

    return decorate
