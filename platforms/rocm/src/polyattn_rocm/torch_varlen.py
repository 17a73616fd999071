"""torch's own FlashAttention over packed documents on these devices: AOTriton's kernels behind torch's function.

They align causal at the top left in some releases, refuse pages, and give the LSE per document in others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polyattn.vendor import Backend, Features, Machine, Request, Slot, flash2, torch_varlen, varlen_padding
from polyattn_rocm import ck, square
from polyattn_rocm.rows import ROWS

#: Architectures that every release has them for; others it takes only as experiments.
_ARCHS = ("gfx90a", "gfx942", "gfx950")
EXPERIMENTS = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
_WHY = "torch's kernels align causal at the top left, or write behind an empty document's LSE, by the release"


def _nothing_more() -> dict[str, Any]:
    """It refuses `num_splits`, which concerns pages alone."""
    return {}


def documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    **call: Any,
) -> flash2.Result:
    """The varlen kernel of `polyattn.vendor.varlen`, its LSE by row and -inf where a document has no key."""
    if causal:  # of squares alone; its backward takes no other, nor one query that is stated as two
        max_k = flash2.least_queries(q, k, max_q)
    result, lse = torch_varlen.documents(
        _nothing_more, q, k, v, out, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, causal=causal, **call
    )
    return result, None if lse is None else _by_row(lse, q.shape[0], cu_q, cu_k)


def _by_row(lse: torch.Tensor, rows: int, cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    """[H,T] from what torch 2.13 gives, or from [documents,H,longest] of releases before."""
    row = torch.arange(rows, device=lse.device)
    document = flash2.documents_of(row, cu_q)
    if lse.dim() == 3:
        place = (row - cu_q.index_select(0, document)).clamp(max=lse.shape[2] - 1)
        lse = lse.transpose(1, 2).flatten(0, 1).index_select(0, document * lse.shape[2] + place).T
    keyless = (cu_k[1:] == cu_k[:-1]).index_select(0, document)
    return lse.masked_fill(keyless, float("-inf"))


dense = partial(square.dense, documents)
packed = partial(square.packed, documents, ROWS)
key_padding = partial(varlen_padding.key_padding, documents, ROWS)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: architectures, causal where the corner matters, a scale that torch 2.10 lacks."""
    reasons = [*torch_varlen.other_scale(request), *square.objections(request, _WHY)]
    if machine.env.get(EXPERIMENTS) != "1":
        wanted = f"; torch tries it on others where {EXPERIMENTS}=1"
        reasons += [reason + wanted for reason in ck.other_arch(machine, *_ARCHS)]
    if request.causal and request.structure_kind == "dense" and request.q.shape[1] < request.k.shape[1]:
        reasons.append(f"causal with {request.q.shape[1]} queries of {request.k.shape[1]} keys: {_WHY}")
    return tuple(reasons)


def _slots() -> tuple[Slot, ...]:
    """Each structure twice: with an LSE, which has no gradient, and with gradients, which differ run to run."""
    forward = Features(
        causal=True, lse=True, gqa="enable_gqa" in torch_varlen.PARAMETERS, deterministic=True, out=True, capture=True,
        dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    trained = replace(forward, lse=False, deterministic=False, backward=True)
    return tuple(
        Slot(f"{__name__}:{kind}", replace(features, kinds=frozenset({kind})))
        for kind in ("dense", "packed", "key_padding")
        for features in (forward, trained)
    )


def backend() -> Backend:
    """`rocm:torch_varlen`. torch 2.10 takes "no window" for one of -1 here, and answers NaN (pytorch PR 173469)."""
    return Backend(
        "torch_varlen",
        _slots(),
        requires=(torch_varlen.needs("2.11"),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
