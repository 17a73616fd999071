"""One case against one backend: what it claims must be right, what it does not claim refused or served exactly."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
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
from polyattn.testing.integrity import PoisonedEmpty, change_problems, contents
from polyattn.testing.targets import Target
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
    problems += _route_problems(answer.routes, target.name, native)
    problems += _answer_problems(asked, answer, tolerance(target.backend.tolerances, dtype))
    if again is not None and not _same_bits(answer, again):
        problems.append("deterministic=True, yet two runs differ in their bits")
    return Outcome("native" if native else "generic", tuple(problems))


def _run(asked: Asked) -> _Answer:
    call, buffer = asked.call, asked.arguments["out"]
    if buffer is not None:
        buffer.fill_(float("nan"))
    with warnings.catch_warnings(), record_routes() as log, PoisonedEmpty():
        warnings.simplefilter("ignore", PolyattnWarning)  # generic routes say that they are slow
        result = attention(call.q, call.k, call.v, **asked.arguments)
        out, lse = result if asked.arguments["return_lse"] else (result, None)
        gradients: tuple[torch.Tensor, ...] = ()
        if asked.wrt:
            gradients = torch.autograd.grad(out, list(asked.wrt.values()), asked.upstream, materialize_grads=True)
    routes = tuple(entry.route for entry in log.entries)
    return _Answer(out, lse, dict(zip(asked.wrt, gradients, strict=True)), routes)


def _route_problems(routes: tuple[str, ...], name: str, native: bool) -> list[str]:
    """A call without rows or keys has no route: the core answers it."""
    return [
        f"explain says it runs {'natively' if native else 'through a composition'}, but {route} ran"
        for route in routes
        if (route == name) != native or name not in route
    ]


def _answer_problems(asked: Asked, answer: _Answer, limit: float) -> list[str]:
    call = asked.call
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    exact = {name: _exact(tensor).requires_grad_(bool(asked.wrt)) for name, tensor in inputs.items()}
    want, want_lse = reference_attention(exact["q"], exact["k"], exact["v"], **call.arguments, return_lse=True)
    buffer = asked.arguments["out"]
    if buffer is not None and answer.out is not buffer:
        return ["out: another tensor than the given buffer was returned"]
    problems = output_problems(answer.out.detach(), want.detach(), want_lse.detach(), call.q, limit)
    if asked.arguments["return_lse"]:
        lse = None if answer.lse is None else answer.lse.detach()
        problems += lse_problems(lse, want_lse.detach(), call.q, limit)
    if asked.wrt:
        wrt = [exact.get(name, tensor) for name, tensor in asked.wrt.items()]
        expected = torch.autograd.grad(want, wrt, _exact(asked.upstream), materialize_grads=True)
        for (name, gradient), right in zip(answer.gradients.items(), expected, strict=True):
            problems += gradient_problems(name, gradient, right, limit)
    return problems


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU, for some devices cannot hold it."""
    return tensor.detach().cpu().to(torch.float64)


def _same_bits(first: _Answer, second: _Answer) -> bool:
    pairs = [(first.out, second.out), *((first.gradients[name], second.gradients[name]) for name in first.gradients)]
    if first.lse is not None and second.lse is not None:
        pairs.append((first.lse, second.lse))
    return all(torch.equal(a, b) for a, b in pairs)
