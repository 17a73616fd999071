"""The pure decision: which of these backends can run this request on this machine, and why not the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

from polyattn.door.backend import Backend, Features, Requires, Slot
from polyattn.door.platform import Machine
from polyattn.door.request import Request


@dataclass(frozen=True)
class Accepted:
    """The backend can run the request, through this slot."""

    backend: Backend
    slot: Slot


@dataclass(frozen=True)
class Rejected:
    """The backend cannot; every reason, each with both sides and the way out where there is one."""

    backend: Backend
    reasons: tuple[str, ...]
    missing_package: bool = False


Decision = Accepted | Rejected
_Limit = Collection[Any] | None


def resolve(request: Request, machine: Machine, backends: Iterable[Backend]) -> tuple[Decision, ...]:
    """One decision a backend, in the given order. Pure: the machine is an argument."""
    needs = tuple(_needs(request))
    return tuple(_decide(request, needs, machine, backend) for backend in backends)


def _decide(request: Request, needs: Sequence[_Need], machine: Machine, backend: Backend) -> Decision:
    missing = missing_requirements(backend.requires, machine)
    if missing:
        return Rejected(backend, missing, missing_package=True)
    reasons = _unread_options(request, machine, backend) + _objections(request, machine, backend)
    lacks = []
    for slot in backend.slots:
        lacked = [need for need in needs if not need.met(slot.features)]
        if not lacked and not reasons:
            return Accepted(backend, slot)
        lacks.append(lacked)
    return Rejected(backend, reasons + tuple(_refusals([slot.features for slot in backend.slots], lacks)))


def _objections(request: Request, machine: Machine, backend: Backend) -> tuple[str, ...]:
    try:
        return tuple(backend.check(request, machine))
    except Exception as error:  # a third party's fault must not take the other backends down; the reason keeps it
        return (f"its check raised {type(error).__name__}: {error}",)


def missing_requirements(requires: tuple[Requires, ...], machine: Machine) -> tuple[str, ...]:
    """Why this machine lacks what a backend needs: not installed, or too old."""
    reasons = []
    for need in requires:
        have = machine.versions.get(need.package)
        hint = f": {need.hint}" if need.hint else ""
        if have is None:
            reasons.append(f"package {need.package} is not installed{hint}")
        elif need.version and _release(have) < _release(need.version):
            reasons.append(f"package {need.package} {have} is older than {need.version}{hint}")
    return tuple(reasons)


def unmet(features: Features, request: Request) -> tuple[str, ...]:
    """Everything a slot with these features lacks for the request, in words."""
    return tuple(need.refused([features]) for need in _needs(request) if not need.met(features))


@dataclass(frozen=True)
class _Need:
    """One thing that a request asks of a slot.

    name        what is asked, in the words of a refusal
    met         do these features have it?
    refused     why not, told of features none of which has it
    limit_of    the structure kind that it limits: slots without that kind have no say
    structural  it is a structure kind
    """

    name: str
    met: Callable[[Features], bool]
    refused: Callable[[Sequence[Features]], str]
    limit_of: str = ""
    structural: bool = False

    def concerns(self, features: Features) -> bool:
        return not self.limit_of or self.limit_of in features.kinds


def _refusals(slots: Sequence[Features], lacks: Sequence[list[_Need]]) -> Iterator[str]:
    """What the closest slot lacks, in words that are true of all slots; lacks[i] is what slots[i] lacks.

    A slot that has what the closest one lacks must in turn lack something that the closest one has: else it would be
    closer. Structure kinds weigh most, since a slot of the asked kind tells more.
    """
    closest = min(lacks, key=lambda lacked: (sum(need.structural for need in lacked), len(lacked)))
    for need in closest:
        concerned = [(slot, lacked) for slot, lacked in zip(slots, lacks, strict=True) if need.concerns(slot)]
        rivals = [[one for one in lacked if one not in closest] for _, lacked in concerned if need not in lacked]
        if rivals:
            yield f"{need.name} is not supported together with {' and '.join(_in_the_way(rivals))}"
        else:
            yield need.refused([slot for slot, _ in concerned] or slots)


def _in_the_way(rivals: Sequence[list[_Need]]) -> Iterator[str]:
    """Names of few needs, at least one of them lacked by every rival."""
    while rivals:
        needs = [need for lacked in rivals for need in lacked]
        most = max(needs, key=needs.count)
        yield most.name
        rivals = [lacked for lacked in rivals if most not in lacked]


def _needs(request: Request) -> Iterator[_Need]:
    facts, dim, value_dim = request.structure_facts, request.head_dim, request.v_head_dim
    for kind in _kinds_needed(request):
        yield _kind(kind)
    if request.structure_kind == "packed":
        yield _documents(facts.documents)
    if request.structure_kind == "video_tiles" and facts.video is not None and facts.video.too_short:
        yield _long_enough(facts.video.too_short)
    yield _listed_need(f"dtype {request.dtype}", request.dtype, attrgetter("dtypes"))
    yield _listed_need(f"head_dim {dim}", dim, attrgetter("head_dims"))
    if value_dim != dim:
        yield _value_dim(dim, value_dim)
    if facts.page_size is not None:
        yield _listed_need(f"page_size {facts.page_size}", facts.page_size, attrgetter("page_sizes"), "paged")
    if request.quant is None:
        yield _Need("quant=None", attrgetter("exact"), _always_quantises)
    else:
        yield _listed_need(f"quant {request.quant!r}", request.quant, attrgetter("quant"))
    heads = f"{request.num_kv_heads} KV heads for {request.num_heads} query heads (GQA)"
    switches = (
        (heads, request.num_kv_heads != request.num_heads, "gqa"),
        ("causal", request.causal, "causal"),
        ("window", request.window is not None, "window"),
        ("softcap", request.softcap != 0.0, "softcap"),
        ("LSE", request.lse, "lse"),
        ("gradients (backward)", request.grad, "backward"),
        ("a gradient of the mask", facts.mask_grad, "mask_grad"),
        ("deterministic=True", request.deterministic, "deterministic"),
        ("graph capture", request.capturing, "capture"),
        ("running in compiled graphs", request.compiling, "compile"),
    )
    yield from (_switched(name, switch) for name, asked, switch in switches if asked)


def _switched(name: str, switch: str) -> _Need:
    return _Need(name, attrgetter(switch), lambda slots: f"{name} is not supported")


def _kind(kind: str) -> _Need:
    takers = {kind, "key_padding"} if kind == "prefix_kv" else {kind}
    name = f"structure {kind!r}"
    return _Need(
        name,
        lambda features: not takers.isdisjoint(features.kinds),
        lambda slots: f"{name} is not supported, only {listed(_union(slot.kinds for slot in slots))}",
        structural=True,
    )


def _documents(count: int | None) -> _Need:
    asked = "an unknown number of documents" if count is None else f"{count} documents"

    def met(features: Features) -> bool:
        most = features.max_documents
        return most is None or (count is not None and count <= most)

    def refused(slots: Sequence[Features]) -> str:
        most = max(slot.max_documents or 0 for slot in slots)
        return f"{asked} asked, at most {most} supported" + (" ([real, pad] only)" if most == 1 else "")

    return _Need(f"packing of {asked}", met, refused, limit_of="packed")


def _long_enough(why: str) -> _Need:
    """What no slot meets: the caller does not want the sparse route here."""
    return _Need(
        "the sparse route", lambda features: False, lambda slots: f"{why} (fallback='dense' runs them densely)"
    )


def _value_dim(dim: int, value_dim: int) -> _Need:
    name = f"value head_dim {value_dim}"

    def refused(slots: Sequence[Features]) -> str:
        able = [slot.head_dims for slot in slots if slot.v_dim]
        return f"{name} not in {listed(_union(able))}" if able else f"{name} differs from {dim}"

    return _Need(name, lambda features: features.v_dim and _within(value_dim, features.head_dims), refused)


def _always_quantises(slots: Sequence[Features]) -> str:
    ways = " or ".join(f"quant={name!r}" for name in sorted(_union(slot.quant for slot in slots)))
    return f"it always quantises, which was not asked for: {ways} asks for it"


def _listed_need(name: str, value: object, limit: Callable[[Features], _Limit], limit_of: str = "") -> _Need:
    return _Need(
        name,
        lambda features: _within(value, limit(features)),
        lambda slots: f"{name} not in {listed(_union(map(limit, slots)))}",
        limit_of,
    )


def _kinds_needed(request: Request) -> tuple[str, ...]:
    carries_spans = request.structure_facts.spans and request.structure_kind != "spans"
    return (request.structure_kind, "spans") if carries_spans else (request.structure_kind,)


def _unread_options(request: Request, machine: Machine, backend: Backend) -> tuple[str, ...]:
    """One sentence, however many there are."""
    unread = [
        f"{type(option).__name__}.{name}"
        for option in request.options
        if option.platform == machine.platform
        for name in option.stated()
        if name not in backend.options
    ]
    return (f"it does not read {', '.join(dict.fromkeys(unread))}",) if unread else ()


def _within(value: object, allowed: _Limit) -> bool:
    return allowed is None or value in allowed


def _union(limits: Iterable[_Limit]) -> set[Any]:
    return {value for limit in limits for value in limit or ()}


def listed(values: Collection[Any]) -> str:
    """A limit as refusals say it: "(64, 128)", "(8 to 256 in steps of 8)", "(none)"."""
    ordered = sorted(values)
    steps = {after - before for before, after in pairwise(ordered)} if isinstance(next(iter(values), ""), int) else ()
    if len(ordered) > 4 and len(steps) == 1:
        return f"({ordered[0]} to {ordered[-1]} in steps of {min(steps)})"
    return "(" + ", ".join(map(str, ordered)) + ")" if ordered else "(none)"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:4])
