"""torch's cuDNN attention op (`aten::_scaled_dot_product_cudnn_attention`) on CPU tensors, as cuDNN 9.19 on sm_90.

Measured on an H200: causal is aligned top-left; a row hidden by -inf is 0, one hidden by a bool mask is finite garbage.
What its LSE says of a row that sees nothing is not known, so it is NaN here.
"""

from __future__ import annotations

import warnings

import torch

from tests.emulators.cuda.numerics import attend, gradients

VERSIONS: dict[str, str] = {}

_library: list[torch.library.Library] = []
_NAN, _INF = float("nan"), float("inf")


def install() -> None:
    """Register the op and its backward for the CPU, in this process for good; once."""
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # it has a composite there already
        library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    _library.append(library)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    """[B,H,S,D] -> out, lse [B,H,Sq,1] (empty unless asked for), and what the backward wants."""
    _check(query, key, value, attn_bias, dropout_p)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, queries = query.shape[:3]
    # rows first in memory, as the device's op lays them out
    out = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    lse = torch.full((batch, heads, queries, 1), _NAN, dtype=torch.float32)
    for b in range(batch):
        q, k, v = (tensor[b].transpose(0, 1) for tensor in (query, key, value))
        seen, bias = _hidden(attn_bias, b, heads, queries, key.shape[2], is_causal)
        result, row_lse = attend(q, k, v, seen, scale=scale, bias=bias)
        if scale <= 0.0 and not bool(seen.all()):
            result = torch.full_like(result, _NAN)  # -inf times such a scale
        if attn_bias is not None and attn_bias.dtype == torch.bool:
            blind = ~seen.any(-1).expand(heads, queries).T
            result[blind] = v.double().mean() + 0.01
        out[b] = result.transpose(0, 1).to(query.dtype)
        lse[b, :, :, 0] = row_lse.masked_fill(row_lse.isneginf(), _NAN).float()
    if not compute_log_sumexp:
        lse = torch.empty(0, dtype=torch.float32)
    none = torch.empty(0)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse, none, none, queries, key.shape[2], seed, seed.clone(), none


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; of an additive mask there is none."""
    attn_bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    _check(query, key, value, attn_bias, dropout_p)
    if logsumexp.numel() == 0:
        raise RuntimeError("backward needs the forward's logsumexp, which was not computed")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grads = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    for b in range(query.shape[0]):
        q, k, v, dout = (tensor[b].transpose(0, 1) for tensor in (query, key, value, grad_out))
        seen, bias = _hidden(attn_bias, b, query.shape[1], query.shape[2], key.shape[2], is_causal)
        found = gradients(dout, q, k, v, seen, scale=scale, bias=bias)
        for grad, value_ in zip(grads, found, strict=True):
            grad[b] = value_.transpose(0, 1).to(query.dtype)
    if attn_bias is not None and 64 in (query.shape[2] % 128, key.shape[2] % 128):
        for grad in grads:  # a published fault of cuDNN with a mask, on H100 and H200
            grad.fill_(_NAN)
    return grads


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor | None, dropout_p: float
) -> None:
    tensors = (query, key, value)
    width, value_width = query.shape[-1], value.shape[-1]
    fits = (width <= 128 and value_width <= 128) or (width, value_width) == (192, 128)
    for holds, text in (
        (dropout_p == 0.0, "dropout is not emulated"),
        (all(t.dim() == 4 for t in tensors), "q, k, v of rank 4 are needed"),
        (query.dtype in (torch.float16, torch.bfloat16), "cuDNN attention takes fp16 and bf16"),
        (query.dtype == key.dtype == value.dtype, "q, k, v of one dtype are needed"),
        (all(t.stride(-1) == 1 for t in tensors), "last dimensions must be dense"),
        (width % 8 == 0 and value_width % 8 == 0, "head dims must be multiples of 8"),
        (fits, f"head dims {width}, {value_width}: at most 128, or 192 and 128"),
        (key.shape[-1] == width, "k must have q's head_dim"),
        (query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1], "KV heads must divide heads"),
        (query.shape[2] > 0 and key.shape[2] > 1, "cuDNN takes no empty sequence and no single key"),
        (attn_bias is None or attn_bias.dtype in (torch.bool, query.dtype), "the mask must be bool or of q's dtype"),
        (attn_bias is None or attn_bias.dim() == 4, "the mask must be of rank 4"),
        (attn_bias is None or attn_bias.stride(-1) == 1, "the mask's last dimension must be dense"),
    ):
        if not holds:
            raise RuntimeError(f"cuDNN attention: {text}")


def _hidden(
    attn_bias: torch.Tensor | None, sample: int, heads: int, queries: int, keys: int, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bool [H|1,Sq,Sk] and the additive mask's finite part."""
    seen = torch.ones(1, queries, keys, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_bias is None:
        return seen, None
    mask = attn_bias[sample if attn_bias.shape[0] > 1 else 0].expand(-1, queries, keys)
    if mask.dtype == torch.bool:
        return seen & mask, None
    return seen & ~mask.isneginf(), mask.masked_fill(mask.isneginf(), 0.0)
