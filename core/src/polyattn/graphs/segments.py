"""A module's forward as graphs with eager attention between them: made once, replayed at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from polyattn.errors import UnsupportedRequest
from polyattn.graphs.device import Graph, GraphDevice
from polyattn.recorders import Tensors, unrecorded
from polyattn.routing import Route
from polyattn.scope import record_routes
from polyattn.structures import KeyPadding, Structure

#: Decides from what a call states whether it stays out of the graphs.
Stays = Callable[[Mapping[str, Any]], bool]


@dataclass
class Seen:
    """One attention call of the warm-up."""

    capturable: bool
    structure: Structure | None


@dataclass(frozen=True)
class Break:
    """An attention call between two graphs: it reads and writes the graphs' memory.

    given  which of the module's structures it takes, so that each replay brings its own; None: the one in `stated`
    queries  what the module makes of that one, a KeyPadding, by `with_queries`
    """

    call: Callable[..., Any]
    qkv: Tensors
    stated: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor | None
    given: int | None
    queries: Any

    def run(self, structures: Sequence[Structure]) -> None:
        stated = self.stated
        if self.given is not None:
            brought = structures[self.given]
            if isinstance(brought, KeyPadding) and self.queries is not None:
                brought = brought.with_queries(self.queries)
            stated = {**stated, "structure": brought}
        if self.lse is None:
            self.call(*self.qkv, **stated, out=self.out)
        else:
            self.lse.copy_(self.call(*self.qkv, **stated, out=self.out)[1])


@dataclass
class Segments:
    """Graphs, and the call after each but the last."""

    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def replay(self, structures: Sequence[Structure]) -> None:
        for graph, between in zip(self.graphs, self.breaks, strict=False):
            graph.replay()
            between.run(structures)
        self.graphs[-1].replay()


def _may_be_captured(route: Route) -> bool:
    """Whether a graph may hold it; an expensive composition may be made of the lengths of one call."""
    return route.slot.features.capture and not route.slow


class Watching:
    """The warm-up: each attention call is made as ever; which of them a graph may hold is seen."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def attention(
        self, call: Callable[..., Any], qkv: Tensors, stated: dict[str, Any], about: Mapping[str, Any]
    ) -> Any:
        with unrecorded(), record_routes() as log:
            answer = call(*qkv, **stated)
        self.seen.append(Seen(all(map(_may_be_captured, log.routes)), stated["structure"]))
        return answer

    def compiled(self, structure: Structure | None) -> None:
        """A call inside compiled code is part of its graph."""


class Capturing:
    """The capture: a call that must stay eager ends a graph and begins the next one."""

    def __init__(self, device: GraphDevice, seen: list[Seen], structures: Sequence[Structure], stays: Stays) -> None:
        self.made = Segments()
        self._device, self._seen, self._structures, self._stays = device, seen, structures, stays
        self._pool = device.pool()
        self._recorded: Graph | None = None
        self._calls = 0
        self._unwritten: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Record, from now on, the next graph."""
        self._recorded = self._device.begin(self._pool)

    def give_up(self) -> None:
        """The module raised: nothing of this is replayed. What the device says to that is not the cause."""
        if self._recorded is not None:
            with suppress(RuntimeError):
                self._device.end(self._recorded)

    def end(self) -> None:
        """Also run what was recorded: that was not done yet, and the call that follows reads its results."""
        graph, self._recorded = self._recorded, None
        assert graph is not None
        self._device.end(graph)
        self.made.graphs.append(graph)
        for static, answer in self._unwritten:
            static.copy_(answer)
        self._unwritten.clear()
        graph.replay()

    def finish(self) -> None:
        """The module has answered: the last graph."""
        self.end()
        if self._calls < len(self._seen):
            raise self._other_calls("fewer")

    def compiled(self, structure: Structure | None) -> None:
        """A call inside compiled code, which cannot stay between graphs."""
        if structure is not None and not structure.facts.capacity and self._place(structure) is not None:
            raise UnsupportedRequest(
                f"an attention call inside compiled code takes a {type(structure).__name__} that each replay would "
                "bring: leave what holds the call uncompiled, or pass a Packed with capacity="
            )

    def _place(self, structure: Structure | None) -> int | None:
        """Which of the module's arguments this is, or was made of."""
        for place, one in enumerate(self._structures):
            if one is structure or (
                isinstance(structure, KeyPadding)
                and isinstance(one, KeyPadding)
                and structure.queries is not None
                and one.with_queries(structure.queries) is structure
            ):
                return place
        return None

    def _other_calls(self, more_or_fewer: str) -> UnsupportedRequest:
        return UnsupportedRequest(
            f"the module made {len(self._seen)} attention calls when it was warmed up and makes {more_or_fewer} now: "
            "which calls it makes must depend on shapes alone"
        )

    def attention(
        self, call: Callable[..., Any], qkv: Tensors, stated: dict[str, Any], about: Mapping[str, Any]
    ) -> Any:
        number, self._calls = self._calls, self._calls + 1
        if number >= len(self._seen):
            raise self._other_calls("more")
        structure, warm = stated["structure"], self._seen[number]
        given = self._place(structure)
        if structure is not None and given is None and structure is not warm.structure:
            raise UnsupportedRequest(
                f"attention call {number} gets a {type(structure).__name__} made inside the module, which a graph "
                "would not make again: build it outside, and pass it to the module or keep it there"
            )
        brought_anew = given is not None and not (structure is not None and structure.facts.capacity)
        if warm.capturable and not brought_anew and not self._stays(about):
            with unrecorded():
                return call(*qkv, **stated)
        return self._between(call, qkv, stated, given)

    def _between(self, call: Callable[..., Any], qkv: Tensors, stated: dict[str, Any], given: int | None) -> Any:
        self.end()
        with unrecorded():
            answer = call(*qkv, **stated)
        self.begin()
        out, lse = answer if stated["return_lse"] else (answer, None)
        # in the pool: they may lie where nothing is alive any more
        buffer = stated["out"]
        static = torch.empty_like(out) if buffer is None else buffer
        static_lse = None if lse is None else torch.empty_like(lse)
        if buffer is None:
            self._unwritten.append((static, out))
        if static_lse is not None and lse is not None:
            self._unwritten.append((static_lse, lse))
        unowned = self._device.unowned
        rest = {name: value for name, value in stated.items() if name != "out"}
        if rest.get("gate") is not None:
            rest["gate"] = unowned(rest["gate"])
        q, k, v = map(unowned, qkv)
        kept_lse = None if static_lse is None else unowned(static_lse)
        own = stated["structure"]
        made = given is not None and own is not self._structures[given]
        queries = own.queries if made else None
        self.made.breaks.append(Break(call, (q, k, v), rest, unowned(static), kept_lse, given, queries))
        return static if static_lse is None else (static, static_lse)
