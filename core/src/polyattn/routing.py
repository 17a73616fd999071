"""Routing: from a request and a choice to the route that runs it, with the reasons the others were not taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from polyattn.choice import AUTOMATIC, Choice, Known, binds, check_names, chosen_first
from polyattn.compositions import COMPOSITIONS, Composition
from polyattn.door.backend import Backend, Slot
from polyattn.door.platform import Machine, Platform
from polyattn.door.request import Request
from polyattn.door.resolution import Accepted, Decision, Rejected, resolve
from polyattn.errors import BackendUnavailable, UnsupportedRequest
from polyattn.measured_order import measured_names
from polyattn.whole_video import densely, stands_in

#: How deep compositions nest: a padded head over gathered pages over a document loop.
_DEPTH = 3


@dataclass(frozen=True)
class Route:
    """The backend and slot that run a request, through which compositions, and why no other.

    lowered   what each composition makes of the request, outermost first: what the next one, or the slot, gets
    reasons   backend name -> why it was not chosen
    notes     what a user should know: a choice that does not bind, a quantisation skipped
    left_out  names of the backends that the user's choice leaves out
    """

    platform: str
    backend: Backend
    slot: Slot
    compositions: tuple[Composition, ...]
    lowered: tuple[Request, ...]
    request: Request
    decisions: tuple[Decision, ...]
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """ "cpu:sdpa", or "loop(cpu:sdpa)" through a composition."""
        name = f"{self.platform}:{self.backend.name}"
        for composition in reversed(self.compositions):
            name = f"{composition.name}({name})"
        return name

    @property
    def slow(self) -> bool:
        """Whether a composition costs more than copies of the tokens, which a native slot would save."""
        return any(not composition.cheap for composition in self.compositions)

    @property
    def native(self) -> bool:
        """Whether the slot takes the request as it is."""
        return not self.compositions


@dataclass(frozen=True)
class _Found:
    backend: Backend
    slot: Slot
    compositions: tuple[Composition, ...] = ()
    lowered: tuple[Request, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """The backends of a platform for one request: named ones first, then those left to automatic choice."""

    named: tuple[Backend, ...]
    automatic: tuple[Backend, ...]
    notes: tuple[str, ...]


def find_route(
    request: Request,
    machine: Machine,
    platform: Platform,
    backends: Sequence[Backend],
    choices: Sequence[Choice],
    known: Known,
    notes: tuple[str, ...] = (),
) -> Route:
    """The route for `request`, or UnsupportedRequest or BackendUnavailable with every backend's reasons.

    `choices` come strongest first (argument, context, configure, environment); the first that binds decides.
    """
    candidates = candidates_for(request, machine, platform, backends, choices, known)
    decisions = resolve(request, machine, backends)
    found = next(_in_order(request, machine, candidates), None)
    video = request.structure_facts.video
    if found is None and request.structure_kind == "video_tiles" and video is not None and video.fallback == "dense":
        told = "; ".join(f"{d.backend.name}: {', '.join(d.reasons)}" for d in decisions if isinstance(d, Rejected))
        note = f"video_tiles runs dense, as its fallback says: {told}"
        return find_route(densely(request), machine, platform, backends, choices, known, (*notes, note))
    if found is None:
        raise _refusal(request, platform, candidates, decisions)
    return Route(
        platform=platform.name,
        backend=found.backend,
        slot=found.slot,
        compositions=found.compositions,
        lowered=found.lowered,
        request=request,
        decisions=decisions,
        reasons=_reasons(found, candidates, decisions),
        notes=(*notes, *_stand_in_notes(request), *candidates.notes),
        left_out=frozenset(b.name for b in backends if b not in (*candidates.named, *candidates.automatic)),
    )


def candidates_for(
    request: Request,
    machine: Machine,
    platform: Platform,
    backends: Sequence[Backend],
    choices: Sequence[Choice],
    known: Known,
) -> Candidates:
    """Which backends may run, in which order, after the user's choices."""
    choice, notes = _binding(choices, platform, backends, known)
    named, automatic = chosen_first(choice, platform.name, _ordered(platform, request, machine, backends))
    return Candidates(named, automatic, notes)


def backends_left(
    choices: Sequence[Choice], platform: Platform, backends: Sequence[Backend], known: Known
) -> tuple[Backend, ...]:
    """The backends that the user's choices leave, before any request is known."""
    named, automatic = chosen_first(_binding(choices, platform, backends, known)[0], platform.name, backends)
    return (*named, *automatic)


def _binding(
    choices: Sequence[Choice], platform: Platform, backends: Sequence[Backend], known: Known
) -> tuple[Choice, tuple[str, ...]]:
    names = [backend.name for backend in backends]
    notes: list[str] = []
    for choice in choices:
        check_names(choice, platform.name, names, known)
        if binds(choice, platform.name, names):
            return choice, tuple(notes)
        notes.append(
            f"the {choice.source} choice {choice.text!r} does not bind on {platform.name}, which has no such backend"
        )
    return AUTOMATIC, tuple(notes)


def _ordered(platform: Platform, request: Request, machine: Machine, backends: Sequence[Backend]) -> list[Backend]:
    names = dict.fromkeys((*measured_names(request, machine), *platform.order(request, machine)))
    rank = {name: place for place, name in enumerate(names)}
    return sorted(backends, key=lambda backend: rank.get(backend.name, len(rank)))


def _in_order(request: Request, machine: Machine, candidates: Candidates) -> Iterator[_Found]:
    for backend in candidates.named:  # each as it can: by itself, else through core's exact compositions
        yield from _natively(request, machine, [backend])
        yield from _composed(request, machine, [backend], COMPOSITIONS, _DEPTH)
    cheap = tuple(composition for composition in COMPOSITIONS if composition.cheap)
    for backend in candidates.automatic:
        yield from _natively(request, machine, [backend])
        yield from _composed(request, machine, [backend], cheap, _DEPTH)
    yield from _composed(request, machine, candidates.automatic, COMPOSITIONS, _DEPTH)


def _natively(request: Request, machine: Machine, backends: Sequence[Backend]) -> Iterator[_Found]:
    for decision in resolve(request, machine, backends):
        if isinstance(decision, Accepted):
            yield _Found(decision.backend, decision.slot)


def _composed(
    request: Request, machine: Machine, backends: Sequence[Backend], compositions: tuple[Composition, ...], depth: int
) -> Iterator[_Found]:
    if depth == 0:
        return
    for composition in compositions:
        for backend in backends:
            tried = set()
            for slot in backend.slots:
                inner = composition.lower(request, slot.features)
                if not isinstance(inner, Request) or inner in tried:
                    continue
                tried.add(inner)
                for found in (
                    *_natively(inner, machine, [backend]),
                    *_composed(inner, machine, [backend], compositions, depth - 1),
                ):
                    steps, requests = (composition, *found.compositions), (inner, *found.lowered)
                    yield _Found(found.backend, found.slot, steps, requests)
                    break


def _stand_in_notes(request: Request) -> tuple[str, ...]:
    """That a dense route serves video tiles, and why."""
    video = request.structure_facts.video
    if video is None or not stands_in(request) or not video.runs_dense:
        return ()
    return (f"video_tiles runs dense: {video.runs_dense}",)


def _reasons(found: _Found, candidates: Candidates, decisions: tuple[Decision, ...]) -> dict[str, tuple[str, ...]]:
    reasons: dict[str, tuple[str, ...]] = {}
    eligible = (*candidates.named, *candidates.automatic)
    for decision in decisions:
        name = decision.backend.name
        if name == found.backend.name:
            if isinstance(decision, Rejected):
                reasons[name] = decision.reasons
        elif decision.backend not in eligible:
            reasons[name] = ("not in the choice",)
        elif isinstance(decision, Rejected):
            reasons[name] = decision.reasons
        else:
            reasons[name] = (f"{found.backend.name} comes first",)
    return reasons


def _refusal(
    request: Request, platform: Platform, candidates: Candidates, decisions: tuple[Decision, ...]
) -> UnsupportedRequest | BackendUnavailable:
    eligible = (*candidates.named, *candidates.automatic)
    rejected = {d.backend.name: d for d in decisions if isinstance(d, Rejected) and d.backend in eligible}
    reasons = {name: (*decision.reasons, *_why_not_composed(request, decision)) for name, decision in rejected.items()}
    lines = [f"  {platform.name}:{name}: {'; '.join(why)}" for name, why in reasons.items()]
    asked = ",".join(b.name for b in candidates.named) or None
    text = "\n".join(
        [
            f"no {'chosen ' if candidates.named else ''}backend of {platform.name} can run: {request}",
            *(lines or ["  every backend was removed by the choice"]),
            *candidates.notes,
            "Change the request as a reason suggests, or the choice (backend=..., use_backend, POLYATTN_BACKEND).",
        ]
    )
    missing = bool(rejected) and all(decision.missing_package for decision in rejected.values())
    error = BackendUnavailable if missing else UnsupportedRequest
    return error.because(text, backend=asked, platform=platform.name, reasons=reasons)


def _why_not_composed(request: Request, decision: Rejected) -> tuple[str, ...]:
    if decision.missing_package:
        return ()
    texts: list[str] = []
    for composition in COMPOSITIONS:
        for slot in decision.backend.slots:
            lowered = composition.lower(request, slot.features)
            if isinstance(lowered, str) and lowered not in texts:
                texts.append(lowered)
    return tuple(texts)
