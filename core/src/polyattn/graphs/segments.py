"""A module's forward as graphs with eager attention between them: made once, replayed at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyattn.errors import UnsupportedRequest
from polyattn.graphs.device import Graph, GraphDevice
from polyattn.recorders import Tensors, unrecorded
from polyattn.routing import Route
from polyattn.scope import record_routes
from polyattn.structures import Structure

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
    """

    call: Callable[..., Any]
    qkv: Tensors
    stated: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor | None
    given: int | None

    def run(self, structures: Sequence[Structure]) -> None:
        stated = self.stated if self.given is None else {**self.stated, "structure": structures[self.given]}
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


class Capturing:
    """The capture: a call that must stay eager ends a graph and begins the next one."""

    def __init__(self, device: GraphDevice, seen: list[Seen], structures: Sequence[Structure], stays: Stays) -> None:
        self.made = Segments()
        self._device, self._seen, self._structures, self._stays = device, seen, structures, stays
        self._pool = device.pool()
        self._calls = 0
        self._unwritten: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Record, from now on, the next graph."""
        graph = self._device.new()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.made.graphs.append(graph)

    def give_up(self) -> None:
        """The module raised: nothing of this is replayed."""
        self.made.graphs[-1].capture_end()

    def end(self) -> None:
        """Also run what was recorded: that was not done yet, and the call that follows reads its results."""
        self.made.graphs[-1].capture_end()
        for static, answer in self._unwritten:
            static.copy_(answer)
        self._unwritten.clear()
        self.made.graphs[-1].replay()

    def attention(
        self, call: Callable[..., Any], qkv: Tensors, stated: dict[str, Any], about: Mapping[str, Any]
    ) -> Any:
        number, self._calls = self._calls, self._calls + 1
        if number >= len(self._seen):
            raise UnsupportedRequest(
                f"the module made {len(self._seen)} attention calls when it was warmed up and makes more now: which "
                "calls it makes must depend on shapes alone"
            )
        structure, warm = stated["structure"], self._seen[number]
        given = next((place for place, one in enumerate(self._structures) if one is structure), None)
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
        self.made.breaks.append(
            Break(call, (q, k, v), rest, unowned(static), None if static_lse is None else unowned(static_lse), given)
        )
        return static if static_lse is None else (static, static_lse)
