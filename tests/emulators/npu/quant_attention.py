"""`mindiesd.quant_attention` as MindIE-SD's sources to come have it, added to the real 3.1.0, which lacks it."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu.stack import current

NOTHING = 2147483647
LAYOUTS = ("BNSD", "BSND")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: What each precision takes by name beyond the signature.
KNOWN = {
    "fp8": {"fp8_fa_mode"},
    "mxfp8": set(),
    "mxfp4": {
        "layout_kv", "layout_out", "mxfp4_scale_alg", "mxfp4_dst_type_max", "metadata", "num_key_value_heads",
        "max_seqlen_q", "max_seqlen_kv", "mask_mode", "win_left", "win_right", "block_table", "sinks", "attn_mask",
        "return_softmax_lse",
    },
}  # fmt: skip
#: fp8_fa_mode -> rows of the tiles of q, k and v, columns of v's, its quant modes and inner_precise.
FP8_MODES = {
    "HIGH_PRECISION": ((128, 256, 256), 128, (7, 7, 7), 0),
    "C8V16_TILING512": ((128, 256, 512), 64, (7, 7, 12), 4),
}
#: Rows that float4 is padded to, with zeros that take part.
PAD = 512


def install() -> None:
    """Adds the function to the real package; ImportError where that is not here."""
    import mindiesd

    mindiesd.quant_attention = quant_attention


def quant_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, precision: str = "fp8", *, layout: str = "BNSD",
    scale: float | None = None, q_rot: torch.Tensor | None = None, k_rot: torch.Tensor | None = None,
    pre_tokens: int = NOTHING, next_tokens: int = NOTHING, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of codes; the output in the layout of the query, or in layout_out. No mask, no causal flag."""
    _check(query, key, value, precision, layout, kwargs)
    query, key = (
        _rotated(name, tensor, turn)
        for name, tensor, turn in (("q_rot", query, q_rot), ("k_rot", key, k_rot))
    )  # fmt: skip
    heads = key.shape[_axis(kwargs.get("layout_kv", layout), "N")]
    given = kwargs.get("num_key_value_heads", heads)
    _need(type(given) is int and given == heads, f"num_key_value_heads must be {heads}, got {given!r}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    windows = {"pre_tokens": pre_tokens, "next_tokens": next_tokens}
    if precision == "fp8":
        return _fp8(query, key, value, layout, scale, windows, kwargs.get("fp8_fa_mode", "HIGH_PRECISION"))
    if precision == "mxfp8":
        return _mxfp8(query, key, value, layout, scale, windows)
    return _mxfp4(query, key, value, layout, scale, windows, kwargs)


def _need(held: bool, words: str) -> None:
    if not held:
        raise ValueError(words)


def _axis(layout: str, name: str) -> int:
    return layout.index(name)


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, precision: str, layout: str, kwargs: dict[str, Any]
) -> None:
    known = current().precisions
    _need(precision in known, f"precision must be one of {known}, got {precision!r}")
    if precision == "mxfp4":
        _need(kwargs.get("layout_out", layout) in LAYOUTS, f"layout_out must be one of {LAYOUTS}")
    if extra := sorted(set(kwargs) - KNOWN[precision]):
        raise TypeError(f"quant_attention() got unexpected keyword arguments for {precision}: {', '.join(extra)}")
    layout_kv = kwargs.get("layout_kv", layout)
    _need({layout, layout_kv} <= set(LAYOUTS), f"layout must be one of {LAYOUTS}, got {layout!r}, {layout_kv!r}")
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _need(tensor.dim() == 4 and 0 not in tensor.shape, f"{name} must be 4-D and not empty: {tuple(tensor.shape)}")
    for name, tensor in tensors.items():
        _need(tensor.dtype in DTYPES, f"{name} must be one of {DTYPES}, got {tensor.dtype}")
    _need(query.device == key.device == value.device, "query, key and value must be on the same device")
    _need(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
    _need(key.shape == value.shape, f"key and value must have one shape: {tuple(key.shape)}, {tuple(value.shape)}")
    _need(query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3], "batch sizes and head dims must be equal")
    heads, kv_heads = query.shape[_axis(layout, "N")], key.shape[_axis(layout_kv, "N")]
    _need(heads % kv_heads == 0, f"{heads} query heads are no multiple of {kv_heads}")
    _need(precision != "fp8" or query.shape[0] == 1, f"fp8 takes one batch row, got {query.shape[0]}")


def _rotated(name: str, tensor: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
    if turn is None:
        return tensor
    dim = tensor.shape[3]
    fits = isinstance(turn, torch.Tensor) and tuple(turn.shape) == (dim, dim)
    _need(fits, f"{name} must be a tensor of ({dim}, {dim})")
    _need(turn.device == tensor.device, f"{name} must be on {tensor.device}, is on {turn.device}")
    return tensor @ turn.to(tensor.dtype)


def _fp8(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str, scale: float, windows: dict[str, int],
    mode: str,
) -> torch.Tensor:  # fmt: skip
    import torch_npu
    from mindiesd.utils.exception import ParametersInvalid

    if mode not in FP8_MODES:
        raise ParametersInvalid(f"fp8_fa_mode must be one of {tuple(FP8_MODES)}, got {mode!r}")
    rows, v_columns, modes, precise = FP8_MODES[mode]
    asked: dict[str, Any] = {"out_dtype": query.dtype, "inner_precise": precise, "softmax_scale": scale, **windows}
    codes = []
    for name, tensor, tall, quant_mode in zip(("query", "key", "value"), (query, key, value), rows, modes, strict=True):
        heads_first = tensor.transpose(1, 2) if layout == "BSND" else tensor
        code, scales = torch_npu.npu_dynamic_block_quant(
            heads_first.squeeze(0), dst_type=torch.float8_e4m3fn, row_block_size=tall,
            col_block_size=v_columns if name == "value" else 128,
        )  # fmt: skip
        codes.append(code[None])
        asked |= {f"dequant_scale_{name}": scales[None], f"{name}_quant_mode": quant_mode}
    out = torch.ops.mindiesd.fused_infer_attention_score_v2(
        *codes, input_layout="BNSD", num_query_heads=codes[0].shape[1], num_key_value_heads=codes[1].shape[1], **asked
    )[0]
    return out.transpose(1, 2) if layout == "BSND" else out


def _mxfp8(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str, scale: float, windows: dict[str, int]
) -> torch.Tensor:
    import torch_npu

    asked: dict[str, Any] = {"softmax_scale": scale, "out_dtype": query.dtype, "input_layout": "TND", **windows}
    codes = []
    for name, tensor, axis, mode in (("query", query, -1, 6), ("key", key, -1, 6), ("value", value, 0, 8)):
        rows = (tensor.transpose(1, 2) if layout == "BNSD" else tensor).flatten(0, 1)
        code, scales = torch_npu.npu_dynamic_mx_quant(rows, dst_type=torch.float8_e4m3fn, axis=axis)
        codes.append(code)
        asked |= {f"dequant_scale_{name}": scales, f"{name}_quant_mode": mode, f"{name}_dtype": torch.float8_e4m3fn}
        asked[f"dequant_scale_{name}_dtype"] = torch_npu.float8_e8m0fnu
    batch = query.shape[0]
    lengths = [tensor.shape[_axis(layout, "S")] for tensor in (query, key)]
    ends = [[length * (row + 1) for row in range(batch)] for length in lengths]
    out = torch_npu.npu_fused_infer_attention_score_v2(
        *codes, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], num_query_heads=codes[0].shape[1],
        num_key_value_heads=codes[1].shape[1], **asked,
    )[0].unflatten(0, (batch, -1))  # fmt: skip
    return out.transpose(1, 2) if layout == "BNSD" else out


def _mxfp4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str, scale: float, windows: dict[str, int],
    kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    import torch_npu

    layout_kv, layout_out = kwargs.get("layout_kv", layout), kwargs.get("layout_out", layout)
    algorithm = {}
    if kwargs.get("mxfp4_scale_alg") is not None:
        algorithm = {"scale_alg": kwargs["mxfp4_scale_alg"], "dst_type_max": kwargs.get("mxfp4_dst_type_max", 7.25)}
    rows = query.shape[_axis(layout, "S")]
    codes, scales, used = [], [], []
    for tensor, own, along_rows in ((query, layout, False), (key, layout_kv, False), (value, layout_kv, True)):
        axis = _axis(own, "S")
        full = _padded(tensor, axis)
        code, exponents = torch_npu.npu_dynamic_mx_quant(
            full, dst_type=torch_npu.float4_e2m1fn_x2, axis=axis if along_rows else -1, **algorithm
        )
        codes.append(code)
        scales.append(exponents)
        used.append(torch.full((full.shape[0],), full.shape[axis], dtype=torch.int32, device=full.device))
    asked = {"mask_mode": kwargs.get("mask_mode", 0), "layout_q": layout, "layout_kv": layout_kv}
    asked |= {"layout_out": layout_out, "win_left": kwargs.get("win_left", windows["pre_tokens"])}
    asked |= {"win_right": kwargs.get("win_right", windows["next_tokens"]), "seqused_q": used[0], "seqused_kv": used[1]}
    modes = {"q_quant_mode": 3, "k_quant_mode": 3, "v_quant_mode": 3}
    metadata = kwargs.get("metadata")
    if metadata is None:
        heads = [tensor.shape[_axis(own, "N")] for tensor, own in ((query, layout), (key, layout_kv))]
        metadata = torch.ops.mindiesd.quant_flash_attn_metadata(*heads, query.shape[3], **modes, **asked)
    others = {
        name: kwargs[name] for name in ("block_table", "sinks", "attn_mask", "return_softmax_lse") if name in kwargs
    }
    out = torch.ops.mindiesd.quant_flash_attn(
        *codes, *scales, metadata=metadata, softmax_scale=scale, **modes, **asked, **others
    )[0]
    return out.narrow(_axis(layout_out, "S"), 0, rows)


def _padded(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    missing = -tensor.shape[axis] % PAD
    return torch.nn.functional.pad(tensor, (*(0, 0) * (3 - axis), 0, missing)) if missing else tensor
