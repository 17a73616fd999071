"""One case against one backend: what it claims must be right, what it does not claim refused or served exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from polyattn.errors import BackendUnavailable, UnsupportedRequest
from polyattn.reference import reference_attention
from polyattn.testing.asking import Asked, ask, decision_of, explained
from polyattn.testing.captured import cold_problems, replayed
from polyattn.testing.cases import Call, Case
from polyattn.testing.claims import refusal_problems
from polyattn.testing.compare import (
    FLOORS,
    gradient_problems,
    lse_problems,
    output_problems,
    quantised_problems,
    tolerance,
    without_poison,
)
from polyattn.testing.integrity import change_problems, contents
from polyattn.testing.running import Trial, gradients, run, same_bits
from polyattn.testing.streams import at_once
from polyattn.testing.targets import Target
from polyattn.testing.threads import one_thread
from polyattn.testing.unsynced import second_call
from polyattn.vendor import Accepted


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    route      native: the backend's own slot ran. generic: core's composition over it did. refused: neither takes it
    problems   what is wrong, in words; none is a pass
    """

    route: Literal["native", "generic", "refused"]
    problems: tuple[str, ...] = ()


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
    if explanation.chosen is None and _refused_plainly(asked):
        return Outcome("refused", tuple(problems))
    before = contents(asked.call)
    try:
        problems += _tried(asked, target, native)
    except (UnsupportedRequest, BackendUnavailable) as refusal:
        if native:
            problems.append(f"explain accepts it, attention refuses it: {refusal}")
        elif not any(refusal.reasons.get(target.backend.name, ())):
            problems.append(f"refused without a reason for {target.name}: {refusal}")
        return Outcome("refused", (*problems, *change_problems(before, asked.call)))
    except Exception as error:  # a backend may raise anything; the case names it
        problems.append(f"raised {type(error).__name__}: {error}")
        return Outcome("native" if native else "generic", tuple(problems))
    if case.within != "capture":  # its replays are checked one by one, on inputs that are written between them
        problems += change_problems(before, asked.call)
    return Outcome("native" if native else "generic", tuple(problems))


def _refused_plainly(asked: Asked) -> bool:
    """Whether the same call is refused with nothing around it as well: that case makes it, and sees the refusal."""
    if asked.case.within:
        return True
    plain = replace(asked, case=replace(asked.case, compiled=False))
    return asked.case.compiled and explained(plain).chosen is None


def _tried(asked: Asked, target: Target, native: bool) -> list[str]:
    """Make the calls of the case and judge each; raises what the backend raises."""
    if asked.case.within == "cold_capture":
        return cold_problems(asked, target)
    problems: list[str] = []
    trials = 0
    for trial in _TRIALS[asked.case.within](asked, target):
        told = [*trial.problems, *_route_problems(trial, target.name, native), *_answer_problems(trial, target)]
        problems += [problem for problem in told if problem not in problems]
        trials += 1
    return problems if trials else ["the case made no call"]


def _plainly(asked: Asked, target: Target) -> Iterator[Trial]:
    answer = run(asked)
    problems = []
    if asked.case.deterministic and not same_bits(answer, run(asked)):
        problems.append("deterministic=True, yet two runs differ in their bits")
    yield Trial(asked, answer, tuple(problems))


_TRIALS: Mapping[str, Callable[[Asked, Target], Iterator[Trial]]] = {
    "": _plainly,
    "capture": replayed,
    "streams": at_once,
    "no_sync": second_call,
}


def _route_problems(trial: Trial, name: str, native: bool) -> list[str]:
    case, routes = trial.asked.case, trial.answer.routes
    if not routes:
        return ["no route was recorded"]
    why = trial.asked.skipped
    if why is not None and not any(why in note for note in trial.answer.notes):
        return [f"the route does not record that {why}"]
    if case.compiled and case.grad:  # the graph's forward records no gradients, its backward does: two requests
        return [f"{name} was asked for, but {route} ran" for route in routes if name not in route]
    return [
        f"explain says it runs {'natively' if native else 'through a composition'}, but {route} ran"
        for route in routes
        if (route == name) != native or name not in route
    ]


def _answer_problems(trial: Trial, target: Target) -> list[str]:
    asked, answer = trial.asked, trial.answer
    call, limit = asked.call, tolerance(target.backend.tolerances, asked.format or asked.dtype)
    given = ("q", "k", "v") if call.gate is None else ("q", "k", "v", "gate")
    inputs = {name: getattr(call, name).detach().to(asked.dtype) for name in given}
    exact = {name: _exact(tensor).requires_grad_(bool(asked.wrt)) for name, tensor in inputs.items()}
    want, want_lse = _wanted(call, exact)
    buffer = asked.arguments["out"]
    if buffer is not None and answer.out is not buffer:
        return ["out: another tensor than the given buffer was returned"]
    pair, pair_lse = (answer.out.detach(), want.detach()), (answer.lse, want_lse.detach())
    if asked.case.poisoned:
        pair = without_poison(*pair)
        pair_lse = pair_lse if answer.lse is None else without_poison(answer.lse, want_lse.detach())
    if asked.format is None:
        problems = output_problems(*pair, pair_lse[1], inputs["q"], limit)
    else:
        least = FLOORS[asked.format] if asked.case.measured else 0.0
        problems = quantised_problems(*pair, pair_lse[1], inputs["q"], limit, least)
    if asked.case.lse:
        lse = None if pair_lse[0] is None else pair_lse[0].detach()
        problems += lse_problems(lse, pair_lse[1], inputs["q"], limit)
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
    for name, right in gradients(exactly, want, want_lse if through_lse else None).items():
        problems += gradient_problems(name, answer.gradients[name], right, limit)
    return problems


def _wanted(call: Call, exact: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output and LSE; with a gate the LSE is the call's without it, which says what rows are empty."""
    tensors = [exact[name] for name in ("q", "k", "v")]
    plain = call.arguments | {"gate": None}
    want, want_lse = reference_attention(*tensors, **plain, return_lse=True)
    if call.gate is None:
        return want, want_lse
    return reference_attention(*tensors, **plain | {"gate": exact["gate"]}), want_lse.detach()


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU, for some devices cannot hold it."""
    return tensor.detach().cpu().to(torch.float64)
