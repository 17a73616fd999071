"""From a case to what is asked of one backend, and what `explain` decides about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyattn.explanation import Explanation, explain
from polyattn.testing.cases import Call, Case
from polyattn.testing.targets import Target
from polyattn.vendor import Decision


@dataclass(frozen=True)
class Asked:
    """A call with everything that `attention` is given beside q, k, v.

    wrt        by name, the tensors whose gradients are compared; empty where none is asked
    upstream   the output's gradient
    """

    call: Call
    arguments: dict[str, Any]
    wrt: dict[str, torch.Tensor]
    upstream: torch.Tensor


def ask(case: Case, target: Target, dtype: torch.dtype) -> Asked:
    """Build the case for this backend; the same numbers every time."""
    make = target.maker(case.name, dtype)
    call = case.build(make)
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    arguments = call.arguments | {
        "return_lse": case.lse,
        "deterministic": case.deterministic,
        "out": None if case.buffer is None else case.buffer(make, shape),
        "backend": target.backend.name,
    }
    wrt = {name: getattr(call, name).requires_grad_() for name in ("q", "k", "v") if case.grad}
    if case.grad and call.structure is not None and call.structure.facts.mask_grad:
        wrt["mask"] = call.structure.tensor  # type: ignore[attr-defined]
    return Asked(call, arguments, wrt, make.normal(shape))


def explained(asked: Asked) -> Explanation:
    """What `explain` says of the call."""
    return explain(asked.call.q, asked.call.k, asked.call.v, **asked.arguments)


def decision_of(target: Target, explanation: Explanation) -> Decision:
    """The decision about this backend."""
    return next(decision for decision in explanation.decisions if decision.backend.name == target.backend.name)
