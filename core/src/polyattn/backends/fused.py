"""Kernels on torch's `scaled_dot_product_attention`: one for any device, one for the CPU's flash kernel and its LSE."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

from polyattn.backends import blocked
from polyattn.backends.calls import Result, wants_grad
from polyattn.door.request import Request

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def portable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    need_lse: bool,
) -> Result:
    """SDPA with whatever kernel torch chooses on the tensors' device. It has neither an LSE nor a softcap."""
    if need_lse or softcap:
        raise ValueError(f"SDPA gives no LSE and takes no softcap, asked need_lse={need_lse}, softcap={softcap}")
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    blind = None
    if mask is not None:
        blind, mask = _seeing(mask)
    out = scaled_dot_product_attention(
        _aligned(_heads_first(q)), _aligned(_heads_first(k)), _aligned(_heads_first(v)), mask, 0.0, causal,
        scale=scale, enable_gqa=k.shape[2] != q.shape[2],
    )  # fmt: skip
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2), None


def bound_portable(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`portable` for a dense shape that SDPA takes as it is: what the request decides is decided once."""
    facts, size = (request.q, request.k, request.v), getattr(torch, request.q.dtype).itemsize
    causal, scale, grouped = request.causal, request.scale, request.num_kv_heads != request.num_heads
    more = request.window is not None or request.out or request.autocast_dtype or scale <= 0.0
    apart = any(one.stride[-1] != 1 or any(step * size % 16 for step in one.stride[:-1]) for one in facts)
    if more or apart or (causal and request.q.shape[1] != request.k.shape[1]):
        return None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        if (q.storage_offset() | k.storage_offset() | v.storage_offset()) * size & 15:  # type: ignore[operator]
            return portable(q, k, v, mask=None, causal=causal, scale=scale, softcap=0.0, need_lse=False)
        result = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        return result.transpose(1, 2), None

    return run


def cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    need_lse: bool,
) -> Result:
    """SDPA kept on the CPU's flash kernel: dense last axes, one head_dim. The LSE comes from that kernel's own op."""
    if softcap:
        raise ValueError(f"SDPA takes no softcap, asked {softcap}")
    if need_lse and wants_grad(q, k, v):  # the kernel's LSE carries no gradient
        return blocked.attend(q, k, v, mask=mask, causal=causal, scale=scale, softcap=0.0, need_lse=True)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    width, value_width = q.shape[-1], v.shape[-1]
    if width < value_width:
        q, k = pad(q, (0, value_width - width)), pad(k, (0, value_width - width))
    elif value_width < width:
        v = pad(v, (0, width - value_width))
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    grouped = k.shape[1] != q.shape[1]
    if grouped and not _flash_groups_heads():
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    if need_lse:
        out, lse = _with_lse(q, k, v, mask, causal, scale)
    else:
        lse = None
        out = scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    out = out.transpose(1, 2)
    return out if value_width >= width else out.narrow(-1, 0, value_width), lse


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same scores by a positive scale: kernels scale what they have hidden with -inf already."""
    return (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)


@lru_cache(maxsize=1)
def _flash_groups_heads() -> bool:
    """Whether this torch's flash kernel takes fewer KV heads; an older one's raw op reads them wrongly, unasked."""
    q, kv = torch.empty(1, 2, 1, 8, device="cpu"), torch.empty(1, 1, 1, 8, device="cpu")
    return bool(torch._fused_sdp_choice(q, kv, kv, enable_gqa=True) == SDPBackend.FLASH_ATTENTION.value)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """[B,S,H,D] -> [B,H,S,D] with a dense last axis, without which torch leaves its fused kernels for a slower one."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).transpose(1, 2)


def _seeing(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that see nothing [B|1,H|1,Sq|1,1], and a mask that lets them see all: fused kernels disagree about them."""
    if mask.dtype == torch.bool:
        blind = mask.any(dim=-1, keepdim=True).logical_not()
        return blind, mask.logical_or(blind)
    blind = mask.isneginf().all(dim=-1, keepdim=True)
    return blind, mask.masked_fill(blind, 0.0)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that begin at 16-byte boundaries: fused kernels of some devices fault on others instead of refusing them."""
    size = tensor.element_size()
    starts = (tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor if all(start * size % 16 == 0 for start in starts) else _padded_rows(tensor)


def _padded_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows are whole multiples of 16 bytes in memory."""
    width = tensor.shape[-1]
    spare = -width % (16 // tensor.element_size())
    return (
        pad(tensor, (0, spare)).narrow(-1, 0, width) if spare else tensor.clone(memory_format=torch.contiguous_format)
    )


def _with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask.logical_not(), float("-inf"))
    out, lse = _flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    lse = lse.float()
    if mask is not None:  # the kernel says 0.0 for a row that sees nothing
        lse = lse.masked_fill(mask.isneginf().all(dim=-1), float("-inf"))
    return out, lse
