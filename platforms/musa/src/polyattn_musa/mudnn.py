"""muDNN's packed attention through torch_musa's own operator: documents and key padding, which its SDPA lacks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from polyattn.vendor import (
    TORCH_ROWS,
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    empty_attention,
    positive_scale,
    sight,
    varlen,
    varlen_padding,
)

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

PACKAGE = "torch_musa"
#: Its first architecture, as numbers.
_LEAST = (2, 2)
_OPERATOR = torch.ops.aten._flash_attention_forward


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
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The varlen kernel of `polyattn.vendor.varlen`, for what `check` lets through; `out` is copied into."""
    if window is not None or softcap or need_lse:
        raise ValueError(f"muDNN takes no window, softcap or LSE here, asked {window}, {softcap}, {need_lse}")
    if q.shape[0] == 0 or k.shape[0] == 0 or max_k == 0:
        result, _ = empty_attention(q, k, v, False)
        return (result if out is None else out.copy_(result)), None
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    answer = _OPERATOR(
        q.contiguous(), k.contiguous(), v.contiguous(), cum_seq_q=cu_q, cum_seq_k=cu_k, max_q=max_q, max_k=max_k,
        dropout_p=0.0, is_causal=causal, return_debug_mask=False, scale=scale,
    )  # fmt: skip
    result = answer[0]
    if cu_q is not cu_k:  # shared boundaries leave no row without a key
        sight.blank_blind(result, None, cu_q, cu_k, k.shape[0], causal, None)
    return (result if out is None else out.copy_(result)), None


packed = partial(varlen.packed, documents, TORCH_ROWS)
key_padding = partial(varlen_padding.key_padding, documents, TORCH_ROWS)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: the architecture, causal off the diagonal, padding that packing would move."""
    reasons = list(varlen_padding.packs_in_place(request, machine))
    numbers = machine.arch.removeprefix("mp_")
    if numbers.isdecimal() and len(numbers) > 1 and (int(numbers[:-1]), int(numbers[-1])) < _LEAST:
        reasons.append(f"architecture {machine.arch} is older than mp_{_LEAST[0]}{_LEAST[1]}")
    facts = request.structure_facts
    apart = facts.queries == "all" if request.structure_kind == "key_padding" else not facts.same_lengths
    if request.causal and apart:
        reasons.append(
            "which corner its causal is aligned at where queries and keys differ in number is not documented"
        )
    return tuple(reasons)


def backend() -> Backend:
    """`musa:mudnn`; its dense calls are SDPA's."""
    taken = Features(
        causal=True, out=True, dtypes=frozenset({"float16", "bfloat16"}), head_dims=frozenset({*range(8, 129, 8), 160})
    )  # fmt: skip
    return Backend(
        "mudnn",
        tuple(
            Slot(f"{__name__}:{kind}", replace(taken, kinds=frozenset({kind}))) for kind in ("packed", "key_padding")
        ),
        requires=(Requires(PACKAGE, "2.7", "from Moore Threads' releases"),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
