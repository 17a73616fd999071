"""torch's flash attention ops (`aten::_flash_attention_forward` and kin) on CPU tensors, by FlashAttention 2's rules.

With them torch.nn.attention.varlen runs here. They take head dims that are multiples of 8 only, and pad nothing.
"""

from __future__ import annotations

import torch

from tests.emulators.aten_flash_ops import answer, register
from tests.emulators.cuda import flash2
from tests.emulators.cuda.flash2 import Scores, check

VERSIONS: dict[str, str] = {}


def install() -> None:
    """Register the ops for the CPU, in this process for good."""
    register(forward, forward_into, backward)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Packed [T,H,D] with boundaries, else [B,S,H,D] -> out, lse [H,T] or [B,H,S], rng_state, unused, debug mask."""
    out = torch.empty_like(query)
    lse = forward_into(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        scale=scale, window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    return answer(out, lse)


def forward_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """As `forward`, into `out`; the LSE."""
    check(dropout_p == 0.0 and alibi_slopes is None and not return_debug_mask, "dropout and alibi are not emulated")
    scores = _scores(query, scale, is_causal, window_size_left, window_size_right)
    q, k, v, cu_q, cu_k = _packed(query, key, value, cum_seq_q, cum_seq_k, seqused_k, block_table)
    parts = flash2.documents(q, k, v, cu_q, cu_k, max_q, seqused_k=seqused_k, block_table=block_table)
    result, lse = flash2.forward(q, parts, scores, max_q, max_k)
    out.copy_(result.view(query.shape))
    if query.dim() == 3:
        return lse
    return lse.view(query.shape[2], *query.shape[:2]).transpose(0, 1).contiguous()


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v."""
    scores = _scores(query, scale, is_causal, window_size_left, window_size_right)
    q, k, v, cu_q, cu_k = _packed(query, key, value, cum_seq_q, cum_seq_k, None, None)
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    dout = grad_out.contiguous().view(q.shape)
    flash2.backward(dout, q, k, v, flash2.documents(q, k, v, cu_q, cu_k, max_q), scores, max_q, max_k, grads)
    dq, dk, dv = (grad.view(given.shape) for grad, given in zip(grads, (query, key, value), strict=True))
    return dq, dk, dv


def _scores(query: torch.Tensor, scale: float | None, is_causal: bool, left: int | None, right: int | None) -> Scores:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return Scores(scale, is_causal, -1 if left is None else left, -1 if right is None else right, 0.0)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The tensors as packed rows, and boundaries: equal ones for a batch, any for pages."""
    check((cu_q is None) == (query.dim() == 4), "boundaries go with packed queries, and only with them")
    if cu_q is None:
        flash2.check_tensors(query, key, value)
        batch = query.shape[0]
        cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32) * t.shape[1] for t in (query, key))
        return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), cu_q, cu_k
    if block_table is not None:
        check(seqused_k is not None, "seqused_k is required with block_table")
        return query, key, value, cu_q, torch.zeros_like(cu_q)
    check(cu_k is not None, "cum_seq_k is required without block_table")
    return query, key, value, cu_q, cu_k
