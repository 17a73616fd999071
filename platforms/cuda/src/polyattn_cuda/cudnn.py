"""cuDNN's attention, by torch's own operator: dense, prefixes of keys, masks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Slot,
    masked,
    on_square,
    positive_scale,
    prefix,
    reachable,
    wants_grad,
)
from polyattn_cuda.arch import arch_below

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

DTYPES = frozenset({"float16", "bfloat16"})
#: Up to 128 in every build; the newest take 256 on some devices, which they do not say beforehand.
HEAD_DIMS = range(8, 129, 8)

#: The operator itself: torch would reach it through a choice of kernels that only process-global switches direct.
_OPERATOR = torch.ops.aten._scaled_dot_product_cudnn_attention


def attend(
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
    """One call of cuDNN: q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,D] -> out [B,Sq,H,D], lse [B,H,Sq] | None.

    `mask` is bool or additive [B|1,H|1,Sq|1,Sk]; causal only where Sq == Sk, since cuDNN aligns it at the top left.
    Gradients are those of torch's operator; the LSE has none.
    """
    if softcap:
        raise ValueError(f"cuDNN takes no softcap, asked {softcap}")
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    blind = bias = None
    if mask is not None:
        blind, bias = _seeing(mask, q.dtype)
    if k.shape[1] == 1:
        out, lse = one_key(q, k, v, bias, scale, need_lse)
    else:
        answer = _OPERATOR(
            _heads_first(q), _heads_first(k), _heads_first(v),
            attn_bias=None if bias is None else _whole(bias, q, k),
            compute_log_sumexp=need_lse or wants_grad(q, k, v), dropout_p=0.0, is_causal=causal, scale=scale,
        )  # fmt: skip
        out = answer[0].transpose(1, 2)
        # [B,H,Sq,1], in some builds without the last axis
        lse = answer[1].reshape(q.shape[0], q.shape[2], q.shape[1]) if need_lse else None
    if blind is not None:
        out = out.masked_fill(blind.transpose(1, 2), 0.0)
        lse = None if lse is None else lse.masked_fill(blind.squeeze(3), float("-inf"))
    return out, lse


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Every query over every key. Causal runs on a square: rows are put before few queries, taken from many."""
    if window is not None:
        raise ValueError(f"cuDNN takes no window here, asked {window}")
    square = partial(attend, mask=None, causal=causal, scale=scale, softcap=softcap, need_lse=need_lse)
    result, lse = on_square(square, q, k, v, need_lse) if causal else square(q, k, v)
    return (result if out is None else out.copy_(result)), lse


def _own_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


prefix_kv = partial(prefix, dense)
mask = partial(masked, attend, _own_dtype)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Against causal that cuDNN would align elsewhere, and devices it has no code for."""
    return (*arch_below(machine, 80), *_misaligned(request))


def _misaligned(request: Request) -> tuple[str, ...]:
    if not request.causal:
        return ()
    queries, keys = request.q.shape[-3], request.k.shape[-3]
    if request.structure_kind == "dense" and queries != keys:
        return (f"causal is aligned at the top left, which differs where Sq={queries} and Sk={keys}",)
    return ()


def _slots() -> tuple[Slot, ...]:
    """Dense twice: with an LSE, which has no gradient, and with gradients; under a mask those may come out NaN."""
    forward = Features(causal=True, lse=True, gqa=True, out=True, capture=True, dtypes=DTYPES, head_dims=HEAD_DIMS)
    trained = replace(forward, lse=False, backward=True)
    over_mask = replace(forward, kinds=frozenset({"mask", "bias"}), window=True)
    unmasked = [
        Slot(f"{__name__}:{function}", replace(features, kinds=frozenset({function})))
        for function in ("dense", "prefix_kv")
        for features in (forward, trained)
    ]
    return (*unmasked, Slot(f"{__name__}:mask", over_mask))


def backend() -> Backend:
    """`cuda:cudnn`, on whatever cuDNN this torch has."""
    return Backend("cudnn", _slots(), check=check, tolerances={"float16": 4e-3, "bfloat16": 3e-2})


def _seeing(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that see nothing [B|1,H|1,Sq|1,1], and an additive mask that lets them see all.

    What cuDNN makes of such rows depends on how they came about. It reads masks in q's dtype, whatever theirs is.
    """
    hidden = mask.logical_not() if mask.dtype == torch.bool else mask.isneginf()
    blind = hidden.all(dim=-1, keepdim=True)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return blind, mask.masked_fill(blind, 0.0)


def _whole(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """An additive mask with every row there, each beginning at a 16-byte boundary; samples and heads may be shared."""
    keys = k.shape[1]
    bias = bias.expand(-1, -1, q.shape[1], -1)
    spare = -keys % 8
    return pad(bias, (0, spare)).narrow(3, 0, keys) if spare else reachable(bias.contiguous())


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """[B,S,H,D] -> [B,H,S,D]; a tensor that repeats its memory is spelt out."""
    repeats = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (tensor.contiguous() if repeats else reachable(tensor)).transpose(1, 2)


def one_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, need_lse: bool
) -> Result:
    """A single key has all the weight; cuDNN refuses it."""
    keys, values = (tensor.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for tensor in (k, v))
    scores = (q.float() * keys.float()).sum(-1) * scale
    weights = scores.unsqueeze(-1).softmax(-1)  # 1, through which q and k get their zero gradients
    out = weights.to(v.dtype) * values
    lse = scores.transpose(1, 2) if bias is None else scores.transpose(1, 2) + bias.squeeze(3).float()
    return out, lse if need_lse else None
