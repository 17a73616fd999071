"""A call, and a case: what one conformance check builds and what it asks of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from polyattn.quant import Quant
from polyattn.structures import Structure
from polyattn.testing.cases.maker import Maker

Window = int | tuple[int | None, int | None]

#: What may be around a call beside autocast and a compiled graph: nothing; a device graph, ready or not; another
#: stream's call at the same time; a device that refuses to be waited for.
Within = Literal["", "capture", "cold_capture", "streams", "no_sync"]


@dataclass(frozen=True)
class Call:
    """The tensors and arguments of one attention call, all but what is asked back."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    structure: Structure | None = None
    causal: bool = False
    scale: float | None = None
    window: Window | None = None
    softcap: float = 0.0
    gate: torch.Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that `attention` and `reference_attention` share."""
        names = ("structure", "causal", "scale", "window", "softcap", "gate")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Case:
    """One conformance case: the same call for every dtype and backend.

    name            "<structure>/<what is special>", with "+lse", "+grad" where they are asked
    structure       the structure's room
    build           makes the call; the same maker gives the same numbers
    lse, grad       also compare the LSE; the gradients of q, k, v (of a gate, and of an additive mask that wants one)
    deterministic   ask for it, run twice, compare bits
    compiled        a compiled graph makes the call
    autocast        float32 tensors, under autocast to the case's dtype; inside the graph where there is one
    buffer          makes the `out=` buffer from the output's shape, or None
    poisoned        some rows see NaN, and are NaN by right: the others are compared
    quant, step, layer  quantise, at this denoising step, in a layer of this index; None: not stated
    measured        quant: so many numbers that an error far below the format's shows that nothing was quantised
    within          what is around the call
    replay          capture: (a maker of other numbers, the captured call) -> the call that the graph is replayed for;
                    it brings the captured call's structure up to date in place. None: the same call on other numbers
    """

    name: str
    structure: str
    build: Callable[[Maker], Call]
    lse: bool = False
    grad: bool = False
    deterministic: bool = False
    compiled: bool = False
    autocast: bool = False
    buffer: Callable[[Maker, tuple[int, ...]], torch.Tensor] | None = None
    poisoned: bool = False
    quant: Quant | None = None
    step: int | None = None
    layer: int | None = None
    measured: bool = False
    within: Within = ""
    replay: Callable[[Maker, Call], Call] | None = None

    @property
    def in_one_dtype(self) -> bool:
        """Whether the case is about what is around the call, which no dtype changes."""
        return self.compiled or self.autocast or bool(self.within)


def edges(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call three times: the output alone, with LSE, with gradients; backends claim these apart."""
    cases = []
    for name, build in calls.items():
        case = partial(Case, structure=structure, build=build)
        cases += [
            case(f"{structure}/{name}"),
            case(f"{structure}/{name}+lse", lse=True),
            case(f"{structure}/{name}+grad", grad=True),
        ]
    return tuple(cases)


def surroundings(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call within a compiled graph and under autocast; `calls` are named by what follows these words."""
    cases = []
    for name, build in calls.items():
        case = partial(Case, structure=structure, build=build)
        cases += [
            case(f"{structure}/compiled{name}", compiled=True),
            case(f"{structure}/compiled{name}+lse", compiled=True, lse=True),
            case(f"{structure}/compiled{name}+grad", compiled=True, grad=True),
            case(f"{structure}/autocast{name}", autocast=True),
            case(f"{structure}/autocast{name}+grad", autocast=True, grad=True),
            case(f"{structure}/compiled_autocast{name}", compiled=True, autocast=True),
        ]
    return tuple(cases)


def captures(
    structure: str,
    calls: Mapping[str, Callable[[Maker], Call]],
    replays: Mapping[str, Callable[[Maker, Call], Call]] | None = None,
) -> tuple[Case, ...]:
    """Each call captured in a device graph and replayed; `replays` bring the structure of that call up to date."""
    cases = []
    for name, build in calls.items():
        case = partial(Case, structure=structure, build=build, within="capture", replay=(replays or {}).get(name))
        cases += [case(f"{structure}/captured{name}"), case(f"{structure}/captured{name}+lse", lse=True)]
    return tuple(cases)


def cold_captures(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call captured before its structure was ever sent to the device."""
    return tuple(
        Case(f"{structure}/captured_cold{name}", structure, build, within="cold_capture")
        for name, build in calls.items()
    )


def concurrent(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call on two streams at once."""
    return tuple(
        Case(f"{structure}/streams{name}", structure, build, lse=True, within="streams")
        for name, build in calls.items()
    )


def unsynced(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call a second time, on a device that refuses to be waited for."""
    cases = []
    for name, build in calls.items():
        case = partial(Case, structure=structure, build=build, within="no_sync")
        cases += [
            case(f"{structure}/unsynced{name}"),
            case(f"{structure}/unsynced{name}+lse", lse=True),
            case(f"{structure}/unsynced{name}+grad", grad=True),
        ]
    return tuple(cases)


def poisoned(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call, where some rows see NaN and their neighbours must not, with LSE and without."""
    cases = []
    for name, build in calls.items():
        case = partial(Case, structure=structure, build=build, poisoned=True)
        cases += [case(f"{structure}/poisoned{name}"), case(f"{structure}/poisoned{name}+lse", lse=True)]
    return tuple(cases)


def lse_gradients(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """Each call with gradients through its LSE, as a merge of partial answers sends them."""
    return tuple(
        Case(f"{structure}/{name}+lse+grad", structure, build, lse=True, grad=True) for name, build in calls.items()
    )


def edges_without_lse(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """As `edges`, without the LSE alone: for what reaches it through the same scores as the output."""
    return tuple(case for case in edges(structure, calls) if not case.lse)


def forward_edges(structure: str, calls: Mapping[str, Callable[[Maker], Call]]) -> tuple[Case, ...]:
    """As `edges`, without gradients: for inputs whose gradients are not defined."""
    return tuple(case for case in edges(structure, calls) if not case.grad)
