"""What Composable Kernel's attention does in both packages that bring it: flash-attn's extension and aiter."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.vendor import Machine, flash2, varlen, wants_grad

#: Rows of a page.
PAGE_SIZES = range(128, 65537, 128)


def documents(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    **call: Any,
) -> flash2.Result:
    """The kernel on documents of any lengths.

    To the keys of a document without queries its backward gives what memory held there (Dao-AILab/flash-attention pull
    request 2421): they are taken out of what it differentiates.
    """
    if cu_q is not cu_k and wants_grad(q, k, v):
        rows = torch.arange(k.shape[0], device=k.device)
        asked = (cu_q[1:] > cu_q[:-1]).index_select(0, flash2.documents_of(rows, cu_k))
        unasked = asked.logical_not().reshape(-1, 1, 1)
        k, v = k.masked_fill(unasked, 0.0), v.masked_fill(unasked, 0.0)
    return flash2.documents(kernel, q, k, v, out, cu_q=cu_q, cu_k=cu_k, **call)


def other_arch(machine: Machine, *built_for: str) -> tuple[str, ...]:
    """Against an architecture that a package has no kernels for; an unknown one is given the benefit of the doubt."""
    if not machine.arch or machine.arch in built_for:
        return ()
    return (f"architecture {machine.arch} is not among those it has kernels for ({', '.join(built_for)})",)
