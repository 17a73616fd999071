"""What every build of FlashAttention 2 shares, on whoever's devices: its limits, its window, its LSE, its pages."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from polyattn.backends import varlen, varlen_padding
from polyattn.backends.calls import Result as Result
from polyattn.backends.derived import derived
from polyattn.backends.visibility import Window as Window
from polyattn.door.platform import Machine
from polyattn.door.request import Request, TensorFacts
from polyattn.structures.paged import PagedMeta

DTYPES = frozenset({"float16", "bfloat16"})
HEAD_DIMS = range(8, 257, 8)
_WIDEST = 2**30


def sides(causal: bool, window: Window) -> tuple[int, int]:
    """The window as its kernels count it: -1 is unbounded, and causal bounds the right side."""
    left, right = bounded(window)
    right = 0 if causal else right
    return -1 if left is None else left, -1 if right is None else right


def bounded(window: Window) -> tuple[int | None, int | None]:
    """The window's sides within what 32 bits hold beside a row's place; no document is as long as the widest."""
    left, right = (None, None) if window is None else window
    return None if left is None else min(left, _WIDEST), None if right is None else min(right, _WIDEST)


def dense(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    window: Window,
    **call: Any,
) -> Result:
    """A slot for "dense": documents of one length, without the keys before every query's window."""
    k, v = within_reach(q, k, v, window)
    return varlen.batched(kernel, q, k, v, out, window=window, **call)


def within_reach(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window
) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [B,S,H,D] without the keys before every query's window.

    Kernels weigh what a window hides with 0, and 0 times NaN is NaN.
    """
    left = None if window is None else window[0]
    unseen = 0 if left is None else max(0, k.shape[1] - q.shape[1] - left)
    if unseen == 0:
        return k, v
    return k.narrow(1, unseen, k.shape[1] - unseen), v.narrow(1, unseen, v.shape[1] - unseen)


def documents(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    window: Window,
    **call: Any,
) -> Result:
    """The kernel on documents of any lengths, with 0 in place of keys before the windows of all queries of theirs."""
    left = None if window is None else window[0]
    if left is not None and cu_q is not cu_k:
        row = torch.arange(k.shape[0], device=k.device)
        first = cu_k[1:] - (cu_q[1:] - cu_q[:-1]) - left
        unseen = (row < first.index_select(0, documents_of(row, cu_k))).reshape(-1, 1, 1)
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    return kernel(q, k, v, out, cu_q=cu_q, cu_k=cu_k, window=window, **call)


def documents_of(rows: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    """Which document each of these rows of a packed tensor belongs to; the last one, behind the last boundary."""
    return torch.searchsorted(cu[1:], rows, right=True).clamp(max=cu.shape[0] - 2)


def least_queries(q: torch.Tensor, k: torch.Tensor, max_q: int) -> int:
    """The longest document to state. Beside fewer KV heads, 1 would promise that every document has just one query."""
    return max(max_q, 2) if q.shape[-2] != k.shape[-2] else max_q


def most_keys(window: Window, max_q: int, max_k: int) -> int:
    """The longest document of keys to state: with a window, no less than that of queries.

    Its host code takes a side of so many keys or more for unbounded, and an unbounded one beside a bounded one for so
    many keys. Neither is true of the right side of a row that lies before its document's first key by more.
    """
    return max(max_q, max_k) if window is not None and max_k > 0 else max_k


def normal_lse(lse: torch.Tensor) -> torch.Tensor:
    """Its LSE with -inf on rows that see nothing, where it says +inf; in place, since no one else holds it."""
    return lse.masked_fill_(lse.isposinf(), float("-inf"))


def objections(request: Request, machine: Machine) -> tuple[str, ...]:
    """Reasons against a request that every build has: padding that packing would move, pages."""
    return (*varlen_padding.packs_in_place(request, machine), *_pages(request))


def _pages(request: Request) -> tuple[str, ...]:
    facts = request.structure_facts
    if request.structure_kind != "paged":
        return ()
    reasons = []
    if not facts.host:
        reasons.append("a block table on the device may name pages that are not there, and its kernel would read them")
    if not all(_dense_rows(pool) for pool in (request.k, request.v)):
        reasons.append("its kernel reads rows that are dense and begin at 16-byte boundaries; the pool would be copied")
    if request.window is not None and request.window[0] is not None:
        reasons.append(
            f"a window's left side over pages, asked {request.window[0]}: its kernel weighs the keys before all "
            "windows with 0, and 0 times a NaN that one of them holds is NaN"
        )
    if facts.query_layout == "padded":
        reasons.append("padded queries over pages are not supported, only batched or packed ones")
    return tuple(reasons)


def _dense_rows(pool: TensorFacts) -> bool:
    *steps, last = pool.stride
    return last == 1 and all(step % 8 == 0 for step in steps)


class PagedKernel(Protocol):
    """Packed queries over pages: q [T,H,D], k and v pools [pages,page_size,Hk,D] -> out [T,H,D], lse [H,T] | None.

    table    int32 [documents, max_pages]; used int32 [documents]: kept keys; cu_k int32: their running sum
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        table: torch.Tensor,
        used: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
        window: Window,
        softcap: float,
        need_lse: bool,
    ) -> Result: ...


def paged(
    kernel: PagedKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot for "paged" over a kernel that reads pages: q [B,Sq,H,D] or packed [T,H,D], a table the host knows."""
    layout = q.shape[:-2]
    if len(layout) == 2:
        cu_q, max_q = varlen.even_boundaries(*layout, q.device), layout[1]
    else:
        cu_q, max_q = meta.cu_q, max(meta.host_q or (0,))
    cu_k = derived(meta, "cu_k", lambda: pad(meta.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0)))
    result, lse = kernel(
        q.reshape(-1, *q.shape[-2:]), k, v, table=meta.block_table, used=meta.kv_lengths, cu_q=cu_q, cu_k=cu_k,
        max_q=max_q, max_k=max(meta.host_kv or (0,)), causal=causal, scale=scale, window=window, softcap=softcap,
        need_lse=need_lse,
    )  # fmt: skip
    if len(layout) == 2:
        result = result.unflatten(0, layout)
        lse = None if lse is None else lse.unflatten(1, layout).transpose(0, 1)
    return (result if out is None else out.copy_(result)), lse
