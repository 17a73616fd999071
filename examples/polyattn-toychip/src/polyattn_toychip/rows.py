"""The slots of `toychip:rows`: the maker's kernel, answering in polyattn's conventions."""

from __future__ import annotations

import math
from functools import partial

import torch

from polyattn.vendor import TORCH_ROWS, empty_attention, sight, varlen, varlen_padding


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
    window: tuple[int | None, int | None] | None,
    softcap: float,
    need_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel on packed documents, as `polyattn.vendor.varlen` asks for it.

    Nothing is dropped: what the kernel has no argument for is claimed by no slot, and is refused here too.
    """
    from toychip_runtime.kernel import attend

    if window is not None or softcap:
        raise ValueError(f"toychip's kernel takes neither window nor softcap, asked {window} and {softcap}")
    if q.shape[0] == 0 or k.shape[0] == 0:
        result, lse = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), lse
    result, log2 = attend(
        query=q.contiguous(), key=k.contiguous(), value=v.contiguous(),
        starts_q=cu_q, starts_k=cu_k, softmax_scale=scale, causal=causal,
    )  # fmt: skip
    # Three habits of the kernel, and what is made of them: base 2, [T,H], and NaN where a row sees no key.
    lse = (log2 * math.log(2.0)).transpose(0, 1).contiguous() if need_lse else None
    sight.blank_blind(result, lse, cu_q, cu_k, k.shape[0], causal, window)
    return (result if out is None else out.copy_(result)), lse


# One kernel, three structures. The core knows what is subtle in each: rows behind the last boundary, empty documents,
# lengths that only the device knows.
dense = partial(varlen.batched, documents)
packed = partial(varlen.packed, documents, TORCH_ROWS)
key_padding = partial(varlen_padding.key_padding, documents, TORCH_ROWS)
