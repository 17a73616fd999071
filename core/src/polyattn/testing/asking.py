"""From a case to what is asked of one backend, and what `explain` decides about it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyattn.explanation import Explanation, explain
from polyattn.testing.cases import Call, Case
from polyattn.testing.targets import Target
from polyattn.vendor import Decision


@dataclass(frozen=True)
class Asked:
    """A call with everything that `attention` is given beside q, k, v.

    dtype           the dtype that is computed in: the tensors' own, but under autocast
    wrt             by name, the tensors whose gradients are compared; empty where none is asked
    upstream        the output's gradient
    upstream_lse    the LSE's gradient
    """

    case: Case
    dtype: torch.dtype
    call: Call
    arguments: dict[str, Any]
    wrt: dict[str, torch.Tensor]
    upstream: torch.Tensor
    upstream_lse: torch.Tensor

    def autocast(self) -> AbstractContextManager[Any]:
        """The surroundings of the call: autocast where the case is about it."""
        return torch.autocast(self.call.q.device.type, self.dtype, enabled=self.case.autocast)


def ask(case: Case, target: Target, dtype: torch.dtype) -> Asked:
    """Build the case for this backend; the same numbers every time."""
    make = target.maker(case.name, torch.float32 if case.autocast else dtype)
    call = case.build(make)
    *front, rows, heads, _ = call.q.shape
    shape = (*front, rows, heads, call.v.shape[-1])
    arguments = call.arguments | {
        "return_lse": case.lse,
        "deterministic": case.deterministic,
        "out": None if case.buffer is None else case.buffer(make, shape),
        "backend": target.backend.name,
    }
    wrt = {name: getattr(call, name).requires_grad_() for name in ("q", "k", "v") if case.grad}
    if case.grad and call.structure is not None and call.structure.facts.mask_grad:
        wrt["mask"] = call.structure.tensor  # type: ignore[attr-defined]
    upstream, upstream_lse = make.normal(shape).to(dtype), make.normal((*front, heads, rows)).float()
    return Asked(case, dtype, call, arguments, wrt, upstream, upstream_lse)


def explained(asked: Asked) -> Explanation:
    """What `explain` says of the call."""
    with asked.autocast():
        explanation = explain(asked.call.q, asked.call.k, asked.call.v, **asked.arguments)
    if not asked.case.compiled:
        return explanation
    return explain(replace(explanation.request, compiling=True), backend=asked.arguments["backend"])


def decision_of(target: Target, explanation: Explanation) -> Decision:
    """The decision about this backend."""
    return next(decision for decision in explanation.decisions if decision.backend.name == target.backend.name)
