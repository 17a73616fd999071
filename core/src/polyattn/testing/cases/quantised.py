"""Quantised calls: what every structure is tried with, in every format, claimed or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from polyattn.quant import METHODS, Quant
from polyattn.testing.cases.call import Call, Case
from polyattn.testing.cases.maker import Maker, contiguous_buffer


def quantised(
    structure: str, calls: Mapping[str, Callable[[Maker], Call]], poisoned: frozenset[str] = frozenset()
) -> tuple[Case, ...]:
    """Each call with and without its LSE; `calls` are named by what follows "quant_fp8".

    Those across a kernel's blocks have so many numbers that their error measures the format.
    """
    cases = []
    for method in METHODS:
        for name, build in calls.items():
            case = partial(
                Case, structure=structure, build=build, quant=Quant(method), measured=name.startswith("_across_blocks"),
                poisoned=name in poisoned,
            )  # fmt: skip
            cases += [
                case(f"{structure}/quant_{method}{name}"),
                case(f"{structure}/quant_{method}{name}+lse", lse=True),
            ]
    return tuple(cases)


def quantised_asks(structure: str, build: Callable[[Maker], Call]) -> tuple[Case, ...]:
    """The plain call with what may be asked beside the format: a backend may serve quantised requests alone."""
    cases = []
    for method in METHODS:
        named = f"{structure}/quant_{method}"
        case = partial(Case, structure=structure, build=build, quant=Quant(method))
        cases += [
            case(f"{named}_unrotated", quant=Quant(method, rotate=False)),
            case(f"{named}_out", buffer=contiguous_buffer),
            case(f"{named}_deterministic", deterministic=True),
            case(f"{named}_compiled", compiled=True),
            case(f"{named}_captured", within="capture"),
            case(f"{named}_unsynced", within="no_sync"),
            case(f"{named}_other_step", quant=Quant(method, skip_steps=(0,)), step=1),
            case(f"{named}_skipped_step", quant=Quant(method, skip_steps=(0,)), step=0),
            case(f"{named}_unknown_step", quant=Quant(method, skip_steps=(0,))),
            case(f"{named}_other_layer", quant=Quant(method, skip_layers=(3,)), layer=4),
            case(f"{named}_skipped_layer", quant=Quant(method, skip_layers=(3,)), layer=3),
        ]
    return tuple(cases)
