"""Whether a machine lets a backend run: the resolver's answers to plain calls of what its slots claim.

`polyattn info` tells it of a backend, `supports` of a capability: both say what a call would meet. Packages of a vendor
may be imported for it, as such a call would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from polyattn.door.backend import Backend, Features, Slot
from polyattn.door.capability import BY_KIND, BY_SWITCH, Capability, capabilities_of
from polyattn.door.platform import Machine
from polyattn.door.request import Request
from polyattn.door.resolution import Accepted, missing_requirements, resolve
from polyattn.environment import on_reload
from polyattn.plain_calls import Heads, plain_calls

_ANY = Heads()
_NOTHING = "no slot of it claims both a structure and a dtype: it takes no call"
#: What a call states that needs a switch of a slot; a window whose sides hide keys of all plain calls.
_STATED: Mapping[str, Mapping[str, Any]] = {
    "window": {"window": (100, 100)}, "softcap": {"softcap": 30.0}, "lse": {"lse": True}, "backward": {"grad": True},
    "deterministic": {"deterministic": True}, "out": {"out": True}, "capture": {"capturing": True},
    "compile": {"compiling": True},
}  # fmt: skip

#: Platform and index -> the machine asked about, and its answers with the backend that each is about.
_answers: dict[tuple[str, int], tuple[Machine, dict[Any, tuple[Backend, bool]]]] = {}


def usable(backend: Backend, machine: Machine) -> tuple[str, tuple[str, ...]]:
    """A word ("usable", "missing package", "not usable") and the reasons.

    Not usable is what takes none of the calls; the reasons are those that all of them met, which the machine gives and
    not the call. So what `info` says of a backend is what `explain` says of it.
    """
    refused: list[tuple[Request, tuple[str, ...]]] = []
    for request in dict.fromkeys(_without_switches(backend, machine)):
        (decision,) = resolve(request, machine, (backend,))
        if isinstance(decision, Accepted):
            return "usable", ()
        if decision.missing_package:
            return "missing package", decision.reasons
        refused.append((request, decision.reasons))
    if not refused:
        return "not usable", (_NOTHING,)
    first, reasons = refused[0]
    shared = tuple(reason for reason in reasons if all(reason in others for _, others in refused))
    return "not usable", shared or tuple(f"{reason} (asked for {first})" for reason in reasons)


def supports(
    cap: Capability, backends: Iterable[Backend], machine: Machine, heads: Heads = _ANY, dtype: str | None = None
) -> bool:
    """Whether one slot of these backends has all of `cap`, and this machine lets it take a call that states it.

    Asked once a machine, backend and question.
    """
    known = _answers_of(machine)
    for backend in backends:
        asked = (id(backend), cap, heads, dtype)
        answer = known.get(asked)
        if answer is None:
            answer = known[asked] = (backend, _has(cap, backend, machine, heads, dtype))
        if answer[1]:
            return True
    return False


def _answers_of(machine: Machine) -> dict[Any, tuple[Backend, bool]]:
    place = (machine.platform, machine.index)
    known = _answers.get(place)
    if known is None or (known[0] is not machine and known[0] != machine):
        known = _answers[place] = (machine, {})
    return known[1]


def _has(cap: Capability, backend: Backend, machine: Machine, heads: Heads, dtype: str | None) -> bool:
    if missing_requirements(backend.requires, machine):
        return False
    able = (slot for slot in backend.slots if cap in capabilities_of(slot.features))
    return any(_takes(cap, backend, slot, machine, heads, dtype) for slot in able)


def _takes(cap: Capability, backend: Backend, slot: Slot, machine: Machine, heads: Heads, dtype: str | None) -> bool:
    """Whether the slot takes a call of each structure and format that `cap` names; of any, where it names none."""
    features = slot.features
    switches: dict[str, Any] = {}
    for name, flag in BY_SWITCH.items():
        if flag in cap:
            switches |= _STATED[name]
    named = [kind for kind, flag in BY_KIND.items() if flag in cap]
    if Capability.MULTI_DOC_VARLEN in cap and "packed" not in named:
        named.append("packed")
    formats = [name for name in sorted(features.quant) if Capability[f"QUANT_{name.upper()}"] in cap]
    alone = (replace(backend, slots=(slot,)),)

    def taken(kinds: Iterable[str], quants: Iterable[str | None]) -> bool:
        calls = (
            replace(_as_slot_has_it(request, features), quant=quant)
            for request in plain_calls(
                features, _device(machine), kinds=tuple(kinds), heads=heads, dtype=dtype, **switches
            )
            for quant in quants
        )
        return any(isinstance(resolve(call, machine, alone)[0], Accepted) for call in calls)

    each_kind: list[tuple[str, ...]] = [(kind,) for kind in named] or [tuple(features.kinds)]
    each_format: list[tuple[str | None, ...]] = [(name,) for name in formats] or [_formats(features)]
    return all(taken(kinds, quants) for kinds, quants in product(each_kind, each_format))


def _as_slot_has_it(request: Request, features: Features) -> Request:
    """With one document, where the slot keeps no two apart: [real, pad]."""
    if request.structure_kind != "packed" or features.max_documents != 1:
        return request
    return replace(request, structure_facts=replace(request.structure_facts, documents=1))


def _without_switches(backend: Backend, machine: Machine) -> Iterator[Request]:
    for slot in backend.slots:
        features = slot.features
        for request in plain_calls(features, _device(machine), kinds=features.kinds, heads=_ANY):
            for quant in _formats(features):
                yield replace(_as_slot_has_it(request, features), quant=quant)


def _formats(features: Features) -> tuple[str | None, ...]:
    return (*((None,) if features.exact else ()), *sorted(features.quant))


def _device(machine: Machine) -> str:
    return f"{machine.device_type}:{machine.index}"


@on_reload
def forget() -> None:
    """Ask anew."""
    _answers.clear()
