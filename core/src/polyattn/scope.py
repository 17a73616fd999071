"""What a `with` block decides for the calls inside it: the backend, the denoising step, a log of routes.

Scopes are stacks in ContextVars, so that threads and tasks keep apart and a scope object may be entered twice. Dynamo
cannot guard those, but it guards the attributes of a thread-local. So there is a mirror: scopes that compiled code
enters itself live in it alone, and of the scopes around compiled code it holds the innermost, as a guard. The operator
that a graph runs reads the ContextVar, so that a mirror that another task has moved costs a recompilation, never truth.
"""

from __future__ import annotations

import json
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from polyattn.routing import Route


class _Mirror(threading.local):
    # set on the instance, thread by thread: Dynamo does not guard a class attribute against being shadowed
    def __init__(self) -> None:
        self.choices_inside: tuple[str, ...] = ()
        self.choice_around: str | None = None
        self.steps_inside: tuple[int, ...] = ()
        self.step_around: int | None = None


_mirror = _Mirror()
choices_here: ContextVar[tuple[str, ...]] = ContextVar("polyattn_choices", default=())
steps_here: ContextVar[tuple[int, ...]] = ContextVar("polyattn_steps", default=())
logs_here: ContextVar[tuple[RouteLog, ...]] = ContextVar("polyattn_logs", default=())


def choice_here() -> str | None:
    """The innermost choice of an eager call."""
    stack = choices_here.get()
    return stack[-1] if stack else None


def step_here() -> int | None:
    """The innermost denoising step of an eager call."""
    stack = steps_here.get()
    return stack[-1] if stack else None


def traced_choice() -> tuple[str | None, str | None]:
    """While tracing: (the choice entered inside the graph, the one around it)."""
    inside = _mirror.choices_inside
    return (inside[-1] if inside else None), _mirror.choice_around


def traced_step() -> int | None:
    """While tracing: the innermost denoising step."""
    inside = _mirror.steps_inside
    return inside[-1] if inside else _mirror.step_around


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
            raise TypeError(f"use_backend: backend names in one string are needed, got {type(choice).__name__}")
        self.choice = choice

    def __enter__(self) -> use_backend:
        if torch.compiler.is_compiling():
            _mirror.choices_inside = (*_mirror.choices_inside, self.choice)
        else:
            choices_here.set((*choices_here.get(), self.choice))
            _mirror.choice_around = self.choice
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            _mirror.choices_inside = _mirror.choices_inside[:-1]
        else:
            choices_here.set(choices_here.get()[:-1])
            _mirror.choice_around = choice_here()


class step:
    """The denoising step `index` of `total`, for step-dependent quantisation.

    >>> import polyattn as pa
    >>> with pa.step(0, 50) as now:
    ...     now.index
    0
    """

    def __init__(self, index: int, total: int) -> None:
        for number in (index, total):
            if isinstance(number, bool) or not isinstance(number, int):
                raise ValueError(f"step: integers are needed, 0 <= index < total, got {index!r} of {total!r}")
        if not 0 <= index < total:
            raise ValueError(f"step: 0 <= index < total is needed, got {index!r} of {total!r}")
        self.index, self.total = index, total

    def __enter__(self) -> step:
        if torch.compiler.is_compiling():
            _mirror.steps_inside = (*_mirror.steps_inside, self.index)
        else:
            steps_here.set((*steps_here.get(), self.index))
            _mirror.step_around = self.index
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            _mirror.steps_inside = _mirror.steps_inside[:-1]
        else:
            steps_here.set(steps_here.get()[:-1])
            _mirror.step_around = step_here()


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

    @property
    def routes(self) -> list[Route]:
        return [route for route, _ in self._by_route.values()]

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

    def __enter__(self) -> RouteLog:
        logs_here.set((*logs_here.get(), self.log))
        return self.log

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logs_here.set(logs_here.get()[:-1])
