"""What forwards derive from a structure's meta (masks, runs, indices): kept on it, so that all layers share one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

_T = TypeVar("_T")

#: Derivations kept on one meta; beyond it the oldest is dropped.
_LIMIT = 16


def derived(meta: Any, key: Hashable, build: Callable[[], _T]) -> _T:
    """`build()`, once for `meta` and `key`; `key` holds everything that the result depends on beside `meta`."""
    kept: dict[Hashable, Any] = vars(meta).setdefault("_derived", {})
    if key not in kept:
        if len(kept) >= _LIMIT:
            kept.pop(next(iter(kept)), None)
        kept[key] = build()
    return cast(_T, kept[key])
