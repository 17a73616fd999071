"""What a `with` block decides for the calls inside it: the backend, the denoising step, a log of routes.

Eager calls read ContextVars, so that threads and tasks keep apart. Dynamo cannot guard those, but it guards the
attributes of a thread-local: traced code reads the mirror in `_traced`.
"""

from __future__ import annotations

import json
import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from polyattn.routing import Route


class _Mirror(threading.local):
    # set on the instance, thread by thread: Dynamo does not guard a class attribute against being shadowed
    def __init__(self) -> None:
        self.choice: str | None = None
        self.step: int | None = None


_traced = _Mirror()
choice_here: ContextVar[str | None] = ContextVar("polyattn_choice", default=None)
step_here: ContextVar[int | None] = ContextVar("polyattn_step", default=None)
logs_here: ContextVar[tuple[RouteLog, ...]] = ContextVar("polyattn_logs", default=())


def current_choice() -> str | None:
    """The scoped choice, as traced code sees it."""
    return _traced.choice if torch.compiler.is_compiling() else choice_here.get()


def current_step() -> int | None:
    """The scoped denoising step, as traced code sees it."""
    return _traced.step if torch.compiler.is_compiling() else step_here.get()


class use_backend:
    """Choose backends for the calls in a scope: `"fa3"`, `"fa3,sdpa"`, `"-sdpa"`, `"fa3,auto"`.

    Binds only calls on platforms that have a backend of that name. Nests, and works around and inside compiled code.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> with pa.use_backend("sdpa"), pa.record_routes() as log:
    ...     _ = pa.attention(q, q, q)
    >>> log.entries[0].route.endswith(":sdpa")
    True
    """

    def __init__(self, choice: str) -> None:
        if not isinstance(choice, str):
            raise TypeError(
                f"use_backend: a list of backend names in one string is needed, got {type(choice).__name__}"
            )
        self.choice = choice
        self._before: str | None = None
        self._token: Token[str | None] | None = None

    def __enter__(self) -> use_backend:
        self._before = _traced.choice
        _traced.choice = self.choice
        if not torch.compiler.is_compiling():
            self._token = choice_here.set(self.choice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _traced.choice = self._before
        if not torch.compiler.is_compiling() and self._token is not None:
            choice_here.reset(self._token)
            self._token = None


class step:
    """The denoising step `index` of `total`, for step-dependent quantisation.

    >>> import polyattn as pa
    >>> with pa.step(0, 50) as now:
    ...     now.index
    0
    """

    def __init__(self, index: int, total: int) -> None:
        if (
            isinstance(index, bool)
            or not isinstance(index, int)
            or not isinstance(total, int)
            or not 0 <= index < total
        ):
            raise ValueError(f"step: 0 <= index < total is needed, got {index!r} of {total!r}")
        self.index, self.total = index, total
        self._before: int | None = None
        self._token: Token[int | None] | None = None

    def __enter__(self) -> step:
        self._before = _traced.step
        _traced.step = self.index
        if not torch.compiler.is_compiling():
            self._token = step_here.set(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _traced.step = self._before
        if not torch.compiler.is_compiling() and self._token is not None:
            step_here.reset(self._token)
            self._token = None


@dataclass
class RouteEntry:
    """One route taken in a scope: how often, for what, and why not another."""

    route: str
    request: str
    reasons: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]
    count: int = 0


@dataclass
class RouteLog:
    """Every route taken while `record_routes()` was active, in order of first use."""

    _by_route: dict[int, tuple[Route, RouteEntry]] = field(default_factory=dict)

    @property
    def entries(self) -> list[RouteEntry]:
        return [entry for _, entry in self._by_route.values()]

    def add(self, route: Route) -> None:
        """Count one call that took `route`."""
        kept = self._by_route.get(id(route))
        if kept is None:  # the route is kept alive beside its entry, so that its id stays its own
            kept = (route, RouteEntry(route.name, str(route.request), dict(route.reasons), route.notes))
            self._by_route[id(route)] = kept
        kept[1].count += 1

    def as_dict(self) -> dict[str, Any]:
        return {"routes": [vars(entry) for entry in self.entries]}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)


class record_routes:
    """Log every route taken in a scope, with counts and reasons.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> with pa.record_routes() as log:
    ...     _ = pa.attention(q, q, q)
    >>> log.entries[0].count
    1
    """

    def __init__(self) -> None:
        self.log = RouteLog()
        self._token: Token[tuple[RouteLog, ...]] | None = None

    def __enter__(self) -> RouteLog:
        self._token = logs_here.set((*logs_here.get(), self.log))
        return self.log

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        logs_here.reset(self._token)
