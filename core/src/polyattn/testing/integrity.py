"""What a call must not do: change its inputs or its structure, or let uninitialised memory through."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from polyattn.testing.cases import Call

_UNINITIALISED = frozenset(
    (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)
)


class PoisonedEmpty(TorchFunctionMode):
    """Within it, torch.empty and its kin return NaN, so that a row left unwritten shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and result.dtype.is_floating_point:
            with torch.no_grad():
                result.fill_(float("nan"))
        return result


def contents(call: Call) -> dict[str, Any]:
    """Copies of everything that a call reads: whole storages, so that a write beside a view shows too."""
    found: dict[str, Any] = {name: _bytes(getattr(call, name)) for name in ("q", "k", "v")}
    if call.gate is not None:
        found["gate"] = _bytes(call.gate)
    if call.structure is not None:
        for name, value in call.structure.__getstate__().items():
            found[f"structure.{name}"] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def change_problems(before: dict[str, Any], call: Call) -> list[str]:
    """What differs from `contents` taken before the call."""
    after = contents(call)
    return [f"{name} was modified" for name in before if not _same(before[name], after[name])]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
    return storage.clone()


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        if before.shape != after.shape:
            return False
        return bool(((before == after) | ((before != before) & (after != after))).all())
    return bool(before == after)
