"""The pure decision: which of these backends can run this request on this machine, and why not the others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

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


def resolve(request: Request, machine: Machine, backends: Iterable[Backend]) -> tuple[Decision, ...]:
    """One decision a backend, in the given order. Pure: the machine is an argument."""
    return tuple(_decide(request, machine, backend) for backend in backends)


def _decide(request: Request, machine: Machine, backend: Backend) -> Decision:
    missing = missing_requirements(backend.requires, machine)
    if missing:
        return Rejected(backend, missing, missing_package=True)
    reasons = _unread_options(request, machine, backend) + _objections(request, machine, backend)
    closest: tuple[str, ...] | None = None
    for slot in backend.slots:
        against = unmet(slot.features, request)
        if not against and not reasons:
            return Accepted(backend, slot)
        if closest is None or len(against) < len(closest):
            closest = against
    return Rejected(backend, reasons + (closest or ()))


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
    facts = request.structure_facts
    reasons = [
        f"structure {kind!r} is not supported, only {_listed(sorted(features.kinds))}"
        for kind in _kinds_needed(request)
        if kind not in features.kinds and not (kind == "prefix_kv" and "key_padding" in features.kinds)
    ]
    if (
        request.structure_kind == "packed"
        and features.max_documents is not None
        and (facts.documents is None or facts.documents > features.max_documents)
    ):
        asked = "an unknown number of documents" if facts.documents is None else f"{facts.documents} documents"
        reasons.append(
            f"{asked} asked, at most {features.max_documents} supported"
            + (" ([real, pad] only)" if features.max_documents == 1 else "")
        )
    if request.dtype not in features.dtypes:
        reasons.append(f"dtype {request.dtype} not in {_listed(sorted(features.dtypes))}")
    if not _within(request.head_dim, features.head_dims):
        reasons.append(f"head_dim {request.head_dim} not in {_listed(features.head_dims)}")
    if request.v_head_dim != request.head_dim:
        if not features.v_dim:
            reasons.append(f"value head_dim {request.v_head_dim} differs from {request.head_dim}")
        elif not _within(request.v_head_dim, features.head_dims):
            reasons.append(f"value head_dim {request.v_head_dim} not in {_listed(features.head_dims)}")
    if request.num_kv_heads != request.num_heads and not features.gqa:
        reasons.append(f"{request.num_kv_heads} KV heads for {request.num_heads} query heads (GQA) is not supported")
    if facts.page_size is not None and not _within(facts.page_size, features.page_sizes):
        reasons.append(f"page_size {facts.page_size} not in {_listed(features.page_sizes)}")
    if request.quant is not None and request.quant not in features.quant:
        reasons.append(f"quant {request.quant!r} not in {_listed(sorted(features.quant))}")
    if request.quant is None and not features.exact:
        ways = " or ".join(f"quant={name!r}" for name in sorted(features.quant))
        reasons.append(f"it always quantises, which was not asked for: {ways} asks for it")
    needs = (
        ("causal", request.causal, features.causal),
        ("window", request.window is not None, features.window),
        ("softcap", request.softcap != 0.0, features.softcap),
        ("LSE", request.lse, features.lse),
        ("gradients (backward)", request.grad, features.backward),
        ("a gradient of the mask", facts.mask_grad, features.mask_grad),
        ("deterministic=True", request.deterministic, features.deterministic),
        ("graph capture", request.capturing, features.capture),
        ("running in compiled graphs", request.compiling, features.compile),
    )
    reasons += [f"{name} is not supported" for name, asked, has in needs if asked and not has]
    return tuple(reasons)


def _kinds_needed(request: Request) -> tuple[str, ...]:
    carries_spans = request.structure_facts.spans and request.structure_kind != "spans"
    return (request.structure_kind, "spans") if carries_spans else (request.structure_kind,)


def _unread_options(request: Request, machine: Machine, backend: Backend) -> tuple[str, ...]:
    return tuple(
        f"option {type(option).__name__}.{name} is not read by it"
        for option in request.options
        if option.platform == machine.platform
        for name in option.stated()
        if name not in backend.options
    )


def _within(value: int, allowed: Collection[int] | None) -> bool:
    return allowed is None or value in allowed


def _listed(values: Collection[object] | None) -> str:
    if isinstance(values, range) and len(values) > 4:
        return f"({values[0]} to {values[-1]} in steps of {values.step})"
    ordered = sorted(values, key=lambda value: (str(type(value)), value)) if values else ()
    return "(" + ", ".join(str(value) for value in ordered) + ")" if ordered else "(none)"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:4])
