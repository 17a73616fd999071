"""From a case to what is asked of one backend, and what `explain` decides about it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyattn.explanation import Explanation, explain
from polyattn.quant import skipped
from polyattn.scope import step
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

    @property
    def skipped(self) -> str | None:
        """Why the call is not quantised, though it asks for it."""
        return None if self.case.quant is None else skipped(self.case.quant, self.case.layer, self.case.step)

    @property
    def format(self) -> str | None:
        """The format that the call is quantised in."""
        return None if self.case.quant is None or self.skipped is not None else self.case.quant.method

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast where the case is about it."""
        return torch.autocast(self.call.q.device.type, self.dtype, enabled=self.case.autocast)

    def around(self) -> AbstractContextManager[Any]:
        """What is around the call: autocast, but where a graph holds it inside, and the denoising step."""
        stack = ExitStack()
        if not self.case.compiled:
            stack.enter_context(self.autocast())
        if self.case.step is not None:
            stack.enter_context(step(self.case.step, STEPS))
        return stack


#: Denoising steps, where a case is at one of them.
STEPS = 4


def ask(case: Case, target: Target, dtype: torch.dtype, numbers: str = "") -> Asked:
    """Build the case for this backend; the same numbers every time, others for another word."""
    make = target.maker(f"{case.name} {numbers}".rstrip(), torch.float32 if case.autocast else dtype)
    call = case.build(make)
    *front, rows, heads, _ = call.q.shape
    shape = (*front, rows, heads, call.v.shape[-1])
    arguments = call.arguments | {
        "return_lse": case.lse,
        "deterministic": case.deterministic,
        "out": None if case.buffer is None else case.buffer(make, shape),
        "backend": target.backend.name,
    }
    if case.quant is not None:
        arguments["quant"] = case.quant
    wanted = ("q", "k", "v") if call.gate is None else ("q", "k", "v", "gate")
    wrt = {name: getattr(call, name).requires_grad_() for name in wanted if case.grad}
    if case.grad and call.structure is not None and call.structure.facts.mask_grad:
        wrt["mask"] = call.structure.tensor  # type: ignore[attr-defined]
    upstream, upstream_lse = make.normal(shape).to(dtype), make.normal((*front, heads, rows)).float()
    return Asked(case, dtype, call, arguments, wrt, upstream, upstream_lse)


def explained(asked: Asked) -> Explanation:
    """What `explain` says of the call."""
    with asked.autocast():
        explanation = explain(asked.call.q, asked.call.k, asked.call.v, **asked.arguments | {"quant": asked.format})
    compiling, capturing = asked.case.compiled, asked.case.within in ("capture", "cold_capture")
    if not compiling and not capturing:
        return explanation
    request = replace(explanation.request, compiling=compiling, capturing=capturing)
    return explain(request, backend=asked.arguments["backend"])


def decision_of(target: Target, explanation: Explanation) -> Decision:
    """The decision about this backend."""
    return next(decision for decision in explanation.decisions if decision.backend.name == target.backend.name)
