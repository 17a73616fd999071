"""Joint and replicated tokens on one rank: plain concatenation of the tensors before the ordinary call."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.distributed.joint import Joint, Replicated
from polyattn.distributed.parallel import check_parallel

Parts = list[tuple[str, tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]]]


def glue(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, parallel: Any, joint: Any, replicated: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) of the glued sequence: joint front, replicated prefix, the sequence, replicated suffix, joint rear."""
    check_parallel(parallel)
    parts = glued_parts(q, k, v, joint=joint, replicated=replicated)
    queries = [tensors[0] for _, tensors in parts if tensors[0] is not None]
    return _cat(queries), _cat([tensors[1] for _, tensors in parts]), _cat([tensors[2] for _, tensors in parts])


def glued_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, joint: Any, replicated: Any) -> Parts:
    """The parts of the glued sequence in order, by name; TypeError or ValueError where one does not fit the others."""
    parts: Parts = [("the sequence", (q, k, v))]
    if replicated is not None:
        if not isinstance(replicated, Replicated):
            raise TypeError(f"replicated: a polyattn.Replicated is needed, got {type(replicated).__name__}")
        _check_counts(replicated, k.shape[-3])
        parts = _with_replicated(parts, replicated)
    if joint is not None:
        if not isinstance(joint, Joint):
            raise TypeError(f"joint: a polyattn.Joint is needed, got {type(joint).__name__}")
        apart: Parts = [("joint", (joint.q, joint.k, joint.v))]
        parts = [*apart, *parts] if joint.where == "front" else [*parts, *apart]
    for name, tensors in parts:
        _check_fits(name, tensors, (q, k, v))
    return parts


def _with_replicated(parts: Parts, replicated: Replicated) -> Parts:
    if isinstance(replicated.prefix, (tuple, list)):
        parts = [("replicated.prefix", tuple(replicated.prefix)), *parts]
    if isinstance(replicated.kv_prefix, (tuple, list)):
        parts = [("replicated.kv_prefix", (None, *replicated.kv_prefix)), *parts]
    if isinstance(replicated.suffix, (tuple, list)):
        parts = [*parts, ("replicated.suffix", tuple(replicated.suffix))]
    return parts


def _check_counts(replicated: Replicated, rows: int) -> None:
    counts = {name: getattr(replicated, name) for name in ("prefix", "suffix", "kv_prefix")}
    stated = {name: count for name, count in counts.items() if isinstance(count, int)}
    if sum(stated.values()) > rows:
        raise ValueError(f"replicated: {stated} are counted among the sequence's rows, but k has {rows}")


def _check_fits(name: str, tensors: Any, sequence: tuple[torch.Tensor, ...]) -> None:
    for letter, part, whole in zip("qkv", tensors, sequence, strict=True):
        if part is None:
            continue
        if part.shape[:-3] != whole.shape[:-3] or part.shape[-2:] != whole.shape[-2:]:
            raise ValueError(
                f"{name}: its {letter} {list(part.shape)} does not glue to {letter} {list(whole.shape)}; "
                "only the number of rows may differ"
            )
        if part.dtype != whole.dtype or part.device != whole.device:
            raise ValueError(
                f"{name}: its {letter} is {part.dtype} on {part.device}, the sequence's {whole.dtype} on {whole.device}"
            )


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-3)
