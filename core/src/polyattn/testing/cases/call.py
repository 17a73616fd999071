"""A call, and a case: what one conformance check builds and what it asks of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from polyattn.structures import Structure
from polyattn.testing.cases.maker import Maker

Window = int | tuple[int | None, int | None]


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

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that `attention` and `reference_attention` share."""
        names = ("structure", "causal", "scale", "window", "softcap")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Case:
    """One conformance case: the same call for every dtype and backend.

    name            "<structure>/<what is special>", with "+lse", "+grad" where they are asked
    structure       the structure's room
    build           makes the call; the same maker gives the same numbers
    lse, grad       also compare the LSE; the gradients of q, k, v (and of an additive mask that wants one)
    deterministic   ask for it, run twice, compare bits
    compiled        a compiled graph makes the call
    autocast        float32 tensors, under autocast to the case's dtype
    buffer          makes the `out=` buffer from the output's shape, or None
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
        ]
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
