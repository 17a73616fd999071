"""torch's flash attention ops as ROCm builds them, over AOTriton, on CPU tensors.

Not FlashAttention 2's rules: causal and windows are aligned top-left, a packed LSE is [B,H,max_q], and keys of used
lengths, tables and splits are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.aten_flash_ops import answer, register
from tests.emulators.cuda.flash2 import Document, check, check_boundaries
from tests.emulators.cuda.numerics import attend, gradients
from tests.emulators.rocm import stack

VERSIONS: dict[str, str] = {}
ENV: dict[str, str] = {}

NAN, INF = float("nan"), float("inf")


def install() -> None:
    """Register the ops for the CPU, in this process for good."""
    register(forward, forward_into, backward)


def forward(query: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Packed [T,H,D] with boundaries, else [B,S,H,D] -> out, lse [B,H,max_q], rng_state, unused, debug mask."""
    out = torch.empty_like(query)
    lse = forward_into(out, query, *given, **named)
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
    **refused: Any,
) -> torch.Tensor:
    """As `forward`, into `out`; the LSE."""
    check(dropout_p == 0.0 and not return_debug_mask, "dropout is not emulated")
    for name, given in refused.items():
        check(given is None, f"[ROCm] mha_varlen_fwd: {name} must be nullopt")
    q, parts = _documents(query, key, value, cum_seq_q, cum_seq_k)
    sides = _sides(window_size_left, window_size_right, is_causal and max_q != 1)
    lse = torch.full((len(parts), q.shape[1], max_q), NAN, dtype=torch.float32)
    written = torch.full(q.shape, NAN, dtype=q.dtype)
    if max_k == 0:
        out.zero_()
        return lse.fill_(INF)
    for i, part in enumerate(parts):
        stop = min(part.q1, part.q0 + max_q)
        seen = _band(stop - part.q0, part.k.shape[0], sides)
        result, row_lse = attend(q[part.q0 : stop], part.k, part.v, seen, scale=_scale(query, scale))
        written[part.q0 : stop] = result.to(q.dtype) if sides is not None else NAN
        # of a row that sees nothing no source says what the LSE is
        lse[i, :, : stop - part.q0] = row_lse.float().masked_fill(row_lse.isneginf(), NAN)
    out.copy_(written.view(query.shape))
    return _by_rows(lse, parts, q.shape[0]) if cum_seq_q is not None and stack.now().varlen.packed_lse else lse


def _by_rows(lse: torch.Tensor, parts: list[Document], rows: int) -> torch.Tensor:
    """[B,H,max_q] as [H,T]."""
    packed = lse.new_full((lse.shape[1], rows), NAN)
    for i, part in enumerate(parts):
        stop = min(part.q1, part.q0 + lse.shape[2])
        packed[:, part.q0 : stop] = lse[i, :, : stop - part.q0]
    return packed


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
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v; NaN for rows of no document."""
    check(not is_causal or max_q == max_k, "For backwards kernel seqlen_q must equal seqlen_k for causal kernels")
    q, parts = _documents(query, key, value, cum_seq_q, cum_seq_k)
    sides = _sides(window_size_left, window_size_right, is_causal and max_q != 1)
    dout = grad_out.contiguous().view(q.shape)
    grads = [torch.full_like(t, NAN, memory_format=torch.contiguous_format) for t in (query, key, value)]
    flat = [grad.view(-1, *grad.shape[-2:]) for grad in grads]
    for part in parts:
        rows, keys = slice(part.q0, part.q1), part.rows
        seen = _band(part.q1 - part.q0, part.k.shape[0], sides)
        found = gradients(dout[rows], q[rows], part.k, part.v, seen, scale=_scale(query, scale))
        for grad, place, one in zip(flat, (rows, keys, keys), found, strict=True):
            grad[place] = one.to(q.dtype) if sides is not None else NAN
    return tuple(grads)


def _documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> tuple[torch.Tensor, list[Document]]:
    check(query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
    strides = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    check(strides, "Input tensor must have contiguous last dimension")
    limit = stack.now().chip.sdpa_head_dim
    check(
        query.shape[-1] <= limit, f"FlashAttention on ROCm forward only supports head dimension at most {limit}"
    )  # fmt: skip
    check(query.shape[-1] == key.shape[-1] == value.shape[-1], "k and v must have q's head_size")
    check(query.shape[-2] % key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    check((cu_q is None) == (cu_k is None) == (query.dim() == 4), "boundaries go with packed rows, and only with them")
    check(query.shape[0] > 0, "batch size must be positive")
    if cu_q is None or cu_k is None:
        check(query.shape[-1] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
        n, m = query.shape[1], key.shape[1]
        parts = [
            Document(b * n, (b + 1) * n, key[b], value[b], slice(b * m, (b + 1) * m)) for b in range(query.shape[0])
        ]
        return query.flatten(0, 1), parts
    bounds_q = check_boundaries("cu_seqlens_q", cu_q, query.shape[0])
    bounds_k = check_boundaries("cu_seqlens_k", cu_k, key.shape[0])
    check(len(bounds_q) == len(bounds_k), "cu_seqlens_k must have shape (batch_size + 1)")
    spans = [slice(*bounds_k[i : i + 2]) for i in range(len(bounds_k) - 1)]
    parts = [Document(bounds_q[i], bounds_q[i + 1], key[s], value[s], s) for i, s in enumerate(spans)]
    return query, parts


def _sides(left: int | None, right: int | None, causal: bool) -> tuple[int, int] | None:
    """The window's sides, below 0 unbounded; None where the build makes NaN of them."""
    facts = stack.now().varlen
    stated = [side for side in (left, right) if side is not None]
    if facts.unbounded_is_nan and any(side < 0 for side in stated):
        return None
    if not facts.aotriton_windows and any(side > 0 for side in stated):
        stack.silent("AOTriton below 0.10 does not read a window")
        return -1, 0 if causal else -1
    right_side = -1 if right is None else right
    return -1 if left is None else left, 0 if causal else right_side


def _band(queries: int, keys: int, sides: tuple[int, int] | None) -> torch.Tensor:
    """Bool [queries,keys]: a window beside the top-left diagonal."""
    left, right = (-1, -1) if sides is None else sides
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale
