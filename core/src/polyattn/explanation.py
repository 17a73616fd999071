"""`pa.explain`: what would run for a call, and for every backend why or why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from polyattn.arguments import Arguments, checked
from polyattn.call import effective_quant, stated_choices
from polyattn.discovery import all_backend_names, backends_of, installed_platform, platform_for, platforms
from polyattn.distributed.glued import glue
from polyattn.distributed.parallel import over_ranks
from polyattn.door.platform import Machine, Platform
from polyattn.door.request import Request
from polyattn.door.resolution import Accepted, Decision, Rejected, resolve
from polyattn.errors import BackendUnavailable, UnsupportedRequest
from polyattn.machine import machine_of
from polyattn.plan import describe, owner_of
from polyattn.routing import Route, find_route
from polyattn.scope import choice_here, step_here
from polyattn.structures import Structure
from polyattn.structures.video_gate import gated


@dataclass(frozen=True)
class Explanation:
    """The answer of `pa.explain`: `chosen` is the route, or None where nothing can run and `refusal` says why.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> isinstance(pa.explain(q, q, q), pa.Explanation)
    True
    """

    request: Request
    machine: Machine
    platform: str
    chosen: Route | None
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()
    refusal: str | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """(backend, verdict, reasons) of every backend, the chosen one first."""
        rows = [(f"{self.platform}:{d.backend.name}", self._verdict(d), self._why(d)) for d in self.decisions]
        return sorted(rows, key=lambda row: not row[1].startswith("chosen"))

    def _verdict(self, decision: Decision) -> str:
        name = decision.backend.name
        if self.chosen is not None and self.chosen.backend.name == name:
            return "chosen" if self.chosen.native else f"chosen through {self.chosen.name}"
        if self.chosen is not None and name in self.chosen.left_out:
            return "not chosen"
        return "could run" if isinstance(decision, Accepted) else "cannot run"

    def _why(self, decision: Decision) -> str:
        if self.chosen is not None:
            reasons = self.chosen.reasons.get(decision.backend.name, ())
        else:
            reasons = decision.reasons if isinstance(decision, Rejected) else ()
        return "; ".join(reasons) or (f"slot {decision.slot.name}" if isinstance(decision, Accepted) else "")

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "request": self.request.as_dict(),
            "machine": self.machine.as_dict(),
            "chosen": None if self.chosen is None else self.chosen.name,
            "backends": [{"backend": name, "verdict": verdict, "reasons": why} for name, verdict, why in self.rows()],
            "notes": list(self.notes),
            "refusal": self.refusal,
        }

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [
            f"request  {self.request}",
            f"machine  {self.machine.platform} {self.machine.arch} {self.machine.name}".rstrip(),
        ]
        lines.append(f"route    {self.chosen.name if self.chosen else 'none'}")
        lines += [f"  {name:<{widths[0]}}  {verdict:<{widths[1]}}  {why}".rstrip() for name, verdict, why in rows]
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


def explain(
    q: torch.Tensor | Request,
    k: Any = None,
    v: Any = None,
    *,
    machine: Machine | None = None,
    structure: Structure | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    softcap: float = 0.0,
    gate: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    quant: Any = None,
    deterministic: bool = False,
    options: Any = (),
    parallel: Any = None,
    joint: Any = None,
    replicated: Any = None,
) -> Explanation:
    """What `pa.attention` would do with these arguments, without doing it.

    Instead of tensors it takes a `Request`, and with `machine=` asks about a described one. Malformed arguments raise
    as in `pa.attention`; a request that nothing can run does not raise, it is explained.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> pa.explain(q, q, q, softcap=30.0).chosen.platform
    'cpu'
    """
    notes: tuple[str, ...] = ()
    if isinstance(q, Request):
        request, platform = q, _owner(q.device_type) if machine is None else _described(machine)
    else:
        arguments = checked(causal, window, softcap, deterministic, options)
        if over_ranks(parallel):
            return _over_ranks(
                q, k, v, machine, arguments, structure=structure, scale=scale, gate=gate, return_lse=return_lse,
                backend=backend, quant=quant, parallel=parallel, joint=joint, replicated=replicated,
            )  # fmt: skip
        q, k, v = glue(q, k, v, parallel=parallel, joint=joint, replicated=replicated)
        if gate is not None:
            structure = gated(structure, gate, q, k, v)
        effective, notes = effective_quant(quant, None, step_here())
        request, platform, _ = describe(
            q,
            k,
            v,
            structure,
            arguments,
            scale=scale,
            lse=return_lse,
            out=out,
            quant=effective,
        )
        platform = platform if machine is None else _described(machine)
    choices = stated_choices(backend, choice_here(), None)
    return explain_request(request, platform, machine or machine_of(platform, request.device), choices, notes)


def _over_ranks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    machine: Machine | None,
    arguments: Arguments,
    *,
    structure: Structure | None,
    scale: float | None,
    gate: torch.Tensor | None,
    return_lse: bool,
    backend: str | None,
    quant: Any,
    parallel: Any,
    joint: Any,
    replicated: Any,
) -> Explanation:
    """The largest ordinary call of this rank, with the strategy as notes; what cannot be shared out is a refusal."""
    from polyattn.distributed.explaining import ordinary_call
    from polyattn.distributed.local import LocalCall

    effective, notes = effective_quant(quant, None, step_here())
    refusal = None
    stated = (scale, arguments.softcap, backend, None, quant, None, arguments.deterministic, arguments.options)
    try:
        call = ordinary_call(
            q, k, v, structure=structure, facts=arguments, gate=gate, return_lse=return_lse, parallel=parallel,
            joint=joint, replicated=replicated, call=LocalCall(*stated) if machine is None else None,
        )  # fmt: skip
        arguments = replace(arguments, causal=call.causal, window=call.window)
        q, k, v, return_lse, notes = call.q, call.k, call.v, call.lse, (*notes, *call.notes)
        structure = call.structure if call.gate is None else gated(call.structure, call.gate, q, k, v)
    except UnsupportedRequest as problem:
        structure, refusal = None, str(problem)
    request, platform, _ = describe(
        q, k, v, structure, arguments, scale=scale, lse=return_lse, out=None, quant=effective
    )
    platform = platform if machine is None else _described(machine)
    where = machine or machine_of(platform, request.device)
    if refusal is not None:
        return Explanation(request, where, platform.name, None, (), notes, refusal)
    return explain_request(request, platform, where, stated_choices(backend, choice_here(), None), notes)


def explain_request(
    request: Request, platform: Platform, machine: Machine, choices: tuple[Any, ...] = (), notes: tuple[str, ...] = ()
) -> Explanation:
    """The explanation of a request on a platform's machine; pure but for the platform's backends being imported."""
    backends = backends_of(platform)
    decisions = resolve(request, machine, backends)
    try:
        route = find_route(request, machine, platform, backends, choices, all_backend_names, notes)
    except (UnsupportedRequest, BackendUnavailable) as refusal:
        return Explanation(request, machine, platform.name, None, decisions, notes, str(refusal))
    return Explanation(request, machine, platform.name, route, decisions, route.notes)


def _owner(device_type: str) -> Platform:
    """The platform that serves a device type here; an installed one without a device can only be described."""
    for report in platforms():
        if report.device_type == device_type and report.status == "declined" and platform_for(device_type) is None:
            raise BackendUnavailable.because(
                f"request: its device is {device_type!r}, but platform {report.name!r} finds none here "
                f"({report.reason}); "
                "give machine= to ask about a described one",
                platform=report.name,
            )
    return owner_of(device_type)


def _described(machine: Machine) -> Platform:
    """The installed platform that a described machine belongs to, whether or not such a device is here."""
    platform = installed_platform(machine.platform)
    if platform is not None:
        return platform
    known = ", ".join(sorted({report.name for report in platforms()}))
    raise BackendUnavailable.because(
        f"machine: it describes platform {machine.platform!r}, which is not installed here ({known} are); "
        f"install polyattn-{machine.platform} to ask about its machines",
        platform=machine.platform,
    )
