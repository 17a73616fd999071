"""Claims, one by one: what features say, what a request needs, and which claims no case was ever accepted for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyattn.testing.asking import ask, decision_of, explained
from polyattn.testing.cases import Case
from polyattn.testing.targets import Target
from polyattn.vendor import Accepted, Features, Rejected, Request, unmet

_SWITCHES = (
    "causal", "window", "softcap", "lse", "gqa", "v_dim", "backward", "mask_grad", "deterministic", "out", "compile",
    "capture",
)  # fmt: skip


def claims_of(features: Features) -> frozenset[str]:
    """Everything a slot says yes to, as words."""
    switches = {switch for switch in _SWITCHES if getattr(features, switch)}
    return frozenset(features.kinds | switches | features.dtypes | {f"quant {method}" for method in features.quant})


def needs_of(request: Request) -> frozenset[str]:
    """The claims that a request makes use of, in the same words."""
    facts = request.structure_facts
    asked = {
        "causal": request.causal,
        "window": request.window is not None,
        "softcap": request.softcap != 0.0,
        "lse": request.lse,
        "gqa": request.num_heads != request.num_kv_heads,
        "v_dim": request.head_dim != request.v_head_dim,
        "backward": request.grad,
        "mask_grad": facts.mask_grad,
        "deterministic": request.deterministic,
        "out": request.out,
        "compile": request.compiling,
        "capture": request.capturing,
        f"quant {request.quant}": request.quant is not None,
        "spans": facts.spans,
    }
    return frozenset({request.structure_kind, request.dtype} | {name for name, needed in asked.items() if needed})


def refusal_problems(decision: Rejected, request: Request, target: Target) -> list[str]:
    """What is wrong with a refusal: no reason, or a slot's own features covering the request with nobody objecting."""
    if not decision.reasons or not all(reason.strip() for reason in decision.reasons):
        return ["refused without a reason"]
    covering = [slot for slot in target.backend.slots if not unmet(slot.features, request)]
    if not covering or target.missing():
        return []
    try:
        objections = target.backend.check(request, target.machine)
    except Exception as error:  # a backend's own code may raise anything
        return [f"its check raised {type(error).__name__}: {error}"]
    if not objections:
        return [f"slot {covering[0].name} claims all that is asked, yet it is refused: {'; '.join(decision.reasons)}"]
    return []


def unaccepted_claims(target: Target, cases: Sequence[Case]) -> tuple[str, ...]:
    """Claims of a backend that not one case was accepted for: claimed, but refused whenever it is asked."""
    claimed = frozenset[str]().union(*(claims_of(features) for features in target.features))
    if not target.surrounds("capture"):
        claimed -= {"capture"}
    dtypes = {name: dtype for dtype in target.dtypes if (name := str(dtype).removeprefix("torch.")) in claimed}
    left = {claim for claim in claimed if "float" not in claim or claim in dtypes}
    for name, dtype in dtypes.items():
        for case in cases:
            if left <= dtypes.keys() - {name}:
                break
            if dtype in target.dtypes_of(case):
                left -= _shown(target, case, dtype)
    return tuple(sorted(left))


def _shown(target: Target, case: Case, dtype: torch.dtype) -> frozenset[str]:
    """The claims that the backend accepts this case by."""
    try:
        explanation = explained(ask(case, target, dtype))
    except Exception:  # the case itself reports what the backend's check raised
        return frozenset()
    decision = decision_of(target, explanation)
    if not isinstance(decision, Accepted):
        return frozenset()
    return needs_of(explanation.request) & claims_of(decision.slot.features)
