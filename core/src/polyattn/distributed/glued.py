"""Calls with joint or replicated tokens on one rank: plain concatenation around the ordinary call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.arguments import check_combination, checked
from polyattn.distributed.joint import Joint, Replicated
from polyattn.distributed.parallel import SequenceParallel
from polyattn.errors import UnsupportedRequest


def attend_glued(
    attend: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    gate: Any,
    parallel: Any,
    joint: Any,
    replicated: Any,
    **arguments: Any,
) -> Any:
    """Glue joint front, replicated prefix, the sequence, replicated suffix, joint rear, and attend over it."""
    if gate is not None:
        _refuse_gate(gate, arguments)
    if parallel is not None:
        if not isinstance(parallel, SequenceParallel):
            raise TypeError(
                f"parallel: a polyattn.distributed.SequenceParallel is needed, got {type(parallel).__name__}"
            )
        if parallel.world_size > 1:
            raise UnsupportedRequest(
                f"parallel: this version attends on one rank; {parallel.world_size} ranks were asked for "
                f"(ulysses={parallel.ulysses}, ring={parallel.ring})"
            )
    parts = [(q, k, v)]
    if replicated is not None:
        if not isinstance(replicated, Replicated):
            raise TypeError(f"replicated: a polyattn.Replicated is needed, got {type(replicated).__name__}")
        parts = _with_replicated(parts, replicated)
    if joint is not None:
        if not isinstance(joint, Joint):
            raise TypeError(f"joint: a polyattn.Joint is needed, got {type(joint).__name__}")
        apart = (joint.q, joint.k, joint.v)
        parts = [apart, *parts] if joint.where == "front" else [*parts, apart]
    return attend(*(_cat([part[i] for part in parts if part[i] is not None]) for i in range(3)), **arguments)


def _with_replicated(parts: list[Any], replicated: Replicated) -> list[Any]:
    if isinstance(replicated.prefix, (tuple, list)):
        parts = [tuple(replicated.prefix), *parts]
    if isinstance(replicated.kv_prefix, (tuple, list)):
        parts = [(None, *replicated.kv_prefix), *parts]
    if isinstance(replicated.suffix, (tuple, list)):
        parts = [*parts, tuple(replicated.suffix)]
    return parts


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-3)


def _refuse_gate(gate: Any, arguments: dict[str, Any]) -> None:
    facts = checked(
        arguments["causal"], arguments["window"], arguments["softcap"], arguments["deterministic"], arguments["options"]
    )
    structure = arguments["structure"]
    check_combination(structure, facts.causal, facts.window, facts.softcap, arguments["return_lse"], gate)
    raise UnsupportedRequest(f"gate: no installed backend serves {structure!r} with a gate")
