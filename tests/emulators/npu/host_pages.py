"""The kit's cases over pages with tables and lengths that the host knows: its own are the device's, all but one.

A backend whose op takes such numbers as they are on the host refuses the kit's own, and would be proved nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from polyattn.structures import Paged
from polyattn.testing.cases import Case, paged
from polyattn.testing.cases.call import Call
from polyattn.testing.cases.maker import Maker


def known(build: Callable[[Maker], Call], make: Maker) -> Call:
    """The same call, what its structure holds read once."""
    call = build(make)
    of = call.structure
    assert isinstance(of, Paged)
    return replace(call, structure=Paged(of.block_table, of.kv_lengths, of.q_lengths, of.spans, check=True))


def _named(case: Case) -> str:
    return case.name.replace("paged/", "paged/known_", 1)


CASES = tuple(
    replace(case, name=_named(case), build=partial(known, case.build))
    for case in paged.CASES
    if case.within not in ("capture", "cold_capture")  # a graph bakes in what the host knows
)
