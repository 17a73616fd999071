"""One case against one backend: what it claims must be right, what it does not claim refused or served exactly."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from polyattn.call import attention
from polyattn.environment import PolyattnWarning
from polyattn.errors import BackendUnavailable, UnsupportedRequest
from polyattn.reference import reference_attention
from polyattn.scope import record_routes
from polyattn.testing.asking import Asked, ask, decision_of, explained
from polyattn.testing.cases import Case
from polyattn.testing.claims import refusal_problems
from polyattn.testing.compare import gradient_problems, lse_problems, output_problems, tolerance
from polyattn.testing.compiled import attend_compiled
from polyattn.testing.integrity import PoisonedEmpty, change_problems, contents
from polyattn.testing.targets import Target
from polyattn.testing.threads import one_thread
from polyattn.vendor import Accepted


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    route      native: the backend's own slot ran. generic: core's composition over it did. refused: neither takes it
    problems   what is wrong, in words; none is a pass
    """

    route: Literal["native", "generic", "refused"]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Answer:
    out: torch.Tensor
    lse: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    routes: tuple[str, ...]


def check(case: Case, target: Target, dtype: torch.dtype) -> Outcome:
    """Run the case and judge it. Whatever a backend raises is a problem in the outcome, never an exception here."""
    with one_thread():
        return _outcome(case, target, dtype)


def _outcome(case: Case, target: Target, dtype: torch.dtype) -> Outcome:
    asked = ask(case, target, dtype)
    try:
        explanation = explained(asked)
    except Exception as error:  # a backend's own check may raise anything
        return Outcome("refused", (f"explain raised {type(error).__name__}: {error}",))
    decision = decision_of(target, explanation)
    native = isinstance(decision, Accepted)
    problems = [] if isinstance(decision, Accepted) else refusal_problems(decision, explanation.request, target)
    before = contents(asked.call)
    try:
        answer = _run(asked)
        again = _run(asked) if case.deterministic else None
    except (UnsupportedRequest, BackendUnavailable) as refusal:
        if native:
            problems.append(f"explain accepts it, attention refuses it: {refusal}")
        elif not any(refusal.reasons.get(target.backend.name, ())):
            problems.append(f"refused without a reason for {target.name}: {refusal}")
        return Outcome("refused", (*problems, *change_problems(before, asked.call)))
    except Exception as error:  # a backend may raise anything; the case names it
        problems.append(f"raised {type(error).__name__}: {error}")
        return Outcome("native" if native else "generic", tuple(problems))
    problems += change_problems(before, asked.call)
    problems += _route_problems(answer.routes, target.name, native, case)
    problems += _answer_problems(asked, answer, tolerance(target.backend.tolerances, dtype))
    if again is not None and not _same_bits(answer, again):
        problems.append("deterministic=True, yet two runs differ in their bits")
    return Outcome("native" if native else "generic", tuple(problems))


def _run(asked: Asked) -> _Answer:
    call, buffer = asked.call, asked.arguments["out"]
    if buffer is not None:
        buffer.fill_(float("nan"))
    attend = attend_compiled if asked.case.compiled else attention
    poison = nullcontext() if asked.case.compiled else PoisonedEmpty()  # Dynamo would trace the mode
    with warnings.catch_warnings(), record_routes() as log, poison:
        warnings.simplefilter("ignore", PolyattnWarning)  # generic routes say that they are slow
        with asked.autocast():
            result = attend(call.q, call.k, call.v, **asked.arguments)
        out, lse = result if asked.arguments["return_lse"] else (result, None)
        gradients = _gradients(asked, out, lse) if asked.wrt else {}
    return _Answer(out, lse, gradients, tuple(entry.route for entry in log.entries))


def _gradients(asked: Asked, out: torch.Tensor, lse: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Through the output, and through the LSE where it carries any; rows without a key have no say."""
    ends, upstream = [out], [asked.upstream.to(out)]
    if lse is not None and lse.requires_grad:
        ends.append(lse)
        upstream.append(asked.upstream_lse.to(lse).masked_fill(lse.isneginf(), 0.0))
    found = torch.autograd.grad(ends, list(asked.wrt.values()), upstream, materialize_grads=True)
    return dict(zip(asked.wrt, found, strict=True))


def _route_problems(routes: tuple[str, ...], name: str, native: bool, case: Case) -> list[str]:
    if not routes:
        return ["no route was recorded"]
    if case.compiled and case.grad:  # the graph's forward records no gradients, its backward does: two requests
        return [f"{name} was asked for, but {route} ran" for route in routes if name not in route]
    return [
        f"explain says it runs {'natively' if native else 'through a composition'}, but {route} ran"
        for route in routes
        if (route == name) != native or name not in route
    ]


def _answer_problems(asked: Asked, answer: _Answer, limit: float) -> list[str]:
    call = asked.call
    inputs = {name: getattr(call, name).detach().to(asked.dtype) for name in ("q", "k", "v")}
    exact = {name: _exact(tensor).requires_grad_(bool(asked.wrt)) for name, tensor in inputs.items()}
    want, want_lse = reference_attention(exact["q"], exact["k"], exact["v"], **call.arguments, return_lse=True)
    buffer = asked.arguments["out"]
    if buffer is not None and answer.out is not buffer:
        return ["out: another tensor than the given buffer was returned"]
    problems = output_problems(answer.out.detach(), want.detach(), want_lse.detach(), inputs["q"], limit)
    if asked.case.lse:
        lse = None if answer.lse is None else answer.lse.detach()
        problems += lse_problems(lse, want_lse.detach(), inputs["q"], limit)
    if not asked.wrt:
        return problems
    through_lse = asked.case.lse and answer.lse is not None and bool(want_lse.isfinite().any())
    if through_lse and answer.lse is not None and not answer.lse.requires_grad:
        return [*problems, "LSE: no gradient flows through it"]
    exactly = replace(
        asked,
        wrt={name: exact.get(name, tensor) for name, tensor in asked.wrt.items()},
        upstream=asked.upstream.cpu(),
        upstream_lse=asked.upstream_lse.cpu(),
    )
    for name, right in _gradients(exactly, want, want_lse if through_lse else None).items():
        problems += gradient_problems(name, answer.gradients[name], right, limit)
    return problems


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU, for some devices cannot hold it."""
    return tensor.detach().cpu().to(torch.float64)


def _same_bits(first: _Answer, second: _Answer) -> bool:
    pairs = [(first.out, second.out), *((first.gradients[name], second.gradients[name]) for name in first.gradients)]
    if first.lse is not None and second.lse is not None:
        pairs.append((first.lse, second.lse))
    return all(torch.equal(a, b) for a, b in pairs)
