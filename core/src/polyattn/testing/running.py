"""Runs the call of a case, and gathers everything that is judged: output, LSE, gradients, routes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from polyattn.call import attention
from polyattn.environment import PolyattnWarning
from polyattn.scope import record_routes
from polyattn.testing.asking import Asked
from polyattn.testing.compiled import attend_compiled
from polyattn.testing.integrity import PoisonedEmpty
from polyattn.testing.layered import attend_in_layer


@dataclass(frozen=True)
class Answer:
    """What a call gave, and the routes that it took with what they note."""

    out: torch.Tensor
    lse: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    routes: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A call with its answer, and what was wrong beside the answer."""

    asked: Asked
    answer: Answer
    problems: tuple[str, ...] = ()


def run(asked: Asked) -> Answer:
    """Make the call, with poison in every buffer; raises what the backend raises."""
    call, buffer = asked.call, asked.arguments["out"]
    if buffer is not None:
        buffer.fill_(float("nan"))
    poison = nullcontext() if asked.case.compiled else PoisonedEmpty()  # Dynamo would trace the mode
    with warnings.catch_warnings(), record_routes() as log, poison, asked.around():
        warnings.simplefilter("ignore", PolyattnWarning)  # generic routes say that they are slow
        result = _attend(asked)(call.q, call.k, call.v, **asked.arguments)
        out, lse = result if asked.arguments["return_lse"] else (result, None)
        found = gradients(asked, out, lse) if asked.wrt else {}
    routes, notes = (
        tuple(entry.route for entry in log.entries),
        tuple(note for entry in log.entries for note in entry.notes),
    )
    return Answer(out, lse, found, routes, notes)


def gradients(asked: Asked, out: torch.Tensor, lse: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Through the output, and through the LSE where it carries any; rows without a key have no say."""
    ends, upstream = [out], [asked.upstream.to(out)]
    if lse is not None and lse.requires_grad:
        ends.append(lse)
        upstream.append(asked.upstream_lse.to(lse).masked_fill(lse.isneginf(), 0.0))
    found = torch.autograd.grad(ends, list(asked.wrt.values()), upstream, materialize_grads=True)
    return dict(zip(asked.wrt, found, strict=True))


def same_bits(first: Answer, second: Answer) -> bool:
    """Whether two answers are equal, bit for bit."""
    pairs = [(first.out, second.out), *((first.gradients[name], second.gradients[name]) for name in first.gradients)]
    if first.lse is not None and second.lse is not None:
        pairs.append((first.lse, second.lse))
    return all(torch.equal(a, b) for a, b in pairs)


def _attend(asked: Asked) -> Callable[..., Any]:
    case = asked.case
    if case.layer is not None:
        return attend_in_layer(case.layer)
    if not case.compiled:
        return attention
    return attend_compiled(asked.autocast if case.autocast else None)
