"""What forwards derive from a structure's meta (masks, runs, indices): kept on it, so that all layers share one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from polyattn.structures.base import keep
from polyattn.structures.lasting import lasting

_T = TypeVar("_T")

#: Derivations kept on one meta; beyond it the oldest is dropped.
_LIMIT = 16


def derived(meta: Any, key: Hashable, build: Callable[[], _T]) -> _T:
    """`build()`, once for `meta` and `key`; `key` holds everything that the result depends on beside `meta`.

    Threads that meet at a first use may each build it.
    """
    kept: dict[Hashable, Any] = vars(meta).setdefault("_derived", {})
    try:
        return cast(_T, kept[key])
    except KeyError:
        pass
    value = lasting(build)()
    keep(kept, _LIMIT, key, value)
    return value
