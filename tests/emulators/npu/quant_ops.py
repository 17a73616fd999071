"""The kernels that mindiesd.quant_attention reaches, on plain tensors: codes back to numbers, attention, and the cast.

What they do to the probabilities inside is not known; here those stay exact.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu import dtypes, layouts, quantise, sparse
from tests.emulators.npu.numerics import Terms, attend
from tests.emulators.npu.stack import current, lint, require_op

TILED = "aclnnFusedInferAttentionScoreV5"
GROUPED = "aclnnFusedInferAttentionScoreV4"
PACKED4 = "aclnnQuantFlashAttn"
NOTHING = 2147483647
#: (query, key and value modes) -> the tiles of q, k and v, and the inner_precise that goes with them.
TILES = {
    (7, 7, 7): (((128, 128), (256, 128), (256, 128)), (0, 1)),
    (7, 7, 12): (((128, 128), (256, 128), (512, 64)), (4,)),
}
#: The modes of groups of 32: e4m3 with q and k along D, v along the packed rows; e2m1.
GROUP_MODES, FOUR_BIT_MODES = (6, 6, 8), (3, 3, 3)
#: Arguments that may not be given with eight-bit codes.
_NEITHER = ("query_rope", "key_rope", "pse_shift", "atten_mask", "block_table", "learnable_sink", "return_softmax_lse")


def fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """mindiesd's own: e4m3 in tiles, [1,N,S,D]."""
    _on_a5(TILED)
    modes = _modes(asked)
    require_op(modes in TILES, TILED, f"quant modes {modes}")
    shapes, precise = TILES[modes]
    require_op(asked.get("inner_precise", 0) in precise, TILED, f"inner_precise {asked.get('inner_precise', 0)}")
    _refuse(TILED, asked)
    require_op(asked.get("input_layout") == "BNSD" and query.dim() == 4, TILED, "layout must be BNSD", 161002)
    require_op(query.shape[0] == key.shape[0] == value.shape[0] == 1, TILED, "B must be 1")
    numbers = []
    for name, codes, shape in zip(("query", "key", "value"), (query, key, value), shapes, strict=True):
        scale = asked.get(f"dequant_scale_{name}")
        require_op(codes.dtype == torch.float8_e4m3fn, TILED, f"{name} is {codes.dtype}, not float8_e4m3fn", 161002)
        wanted = quantise.tiles_of(codes.shape, shape)
        fits = scale is not None and scale.dtype == torch.float32 and tuple(scale.shape) == wanted
        require_op(fits, TILED, f"dequant_scale_{name} must be float32 {wanted}", 161002)
        numbers.append(quantise.from_tiles(codes, scale, shape))
    return _attended(TILED, numbers, [(slice(None), slice(None))], asked, "BNSD"), torch.full((1,), float("nan"))


def grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_fused_infer_attention_score_v2 with e4m3 in groups of 32, [T,N,D]."""
    _on_a5(GROUPED)
    modes = _modes(asked)
    require_op(modes == GROUP_MODES, GROUPED, f"quant modes {modes}: this CANN has {GROUP_MODES} alone")
    _refuse(GROUPED, asked)
    require_op(asked.get("input_layout") == "TND" and query.dim() == 3, GROUPED, "layout must be TND", 161002)
    require_op(asked.get("inner_precise", 0) in (0, 1), GROUPED, f"inner_precise {asked.get('inner_precise')}")
    numbers = []
    for name, codes, axis in (("query", query, -1), ("key", key, -1), ("value", value, 0)):
        scale, wanted = asked.get(f"dequant_scale_{name}"), quantise.exponents_of(codes.shape, axis)
        require_op(codes.dtype == torch.float8_e4m3fn, GROUPED, f"{name} is {codes.dtype}, not float8_e4m3fn", 161002)
        require_op(
            asked.get(f"dequant_scale_{name}_dtype") == dtypes.E8M0, GROUPED, f"dequant_scale_{name}_dtype", 161002
        )
        fits = scale is not None and scale.dtype == torch.uint8 and tuple(scale.shape) == wanted
        require_op(fits, GROUPED, f"dequant_scale_{name} must be bytes {wanted}", 161002)
        numbers.append(quantise.from_groups(codes, scale, axis))
    ends = [asked.get("actual_seq_qlen") or [], asked.get("actual_seq_kvlen") or []]
    fits = all(ends) and len(ends[0]) == len(ends[1]) and (ends[0][-1], ends[1][-1]) == (len(query), len(key))
    require_op(fits, GROUPED, f"TND takes both lists of ends, up to the last row, not {ends}")
    k_lengths = layouts.lengths_of(ends[1])
    if len(k_lengths) > 1:
        whole = all(length % quantise.GROUP == 0 for length in k_lengths)
        lint(whole, "mxfp8: a group of value rows crosses documents, which the kernel may not take")
    rows = zip(*(layouts.slices_of(layouts.lengths_of(side)) for side in ends), strict=True)
    return _attended(GROUPED, numbers, list(rows), asked, "TND"), torch.full((1,), float("nan"))


def quant_flash_attn_metadata(seqused_q: torch.Tensor | None = None, **asked: Any) -> torch.Tensor:
    """What quant_flash_attn wants beside its tensors; its content is the device's own."""
    _on_a5(PACKED4)
    require_op(seqused_q is not None and seqused_q.dtype == torch.int32, PACKED4, "seqused_q must be int32", 161002)
    return torch.zeros(1024, dtype=torch.int32)


def quant_flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_descale: torch.Tensor, k_descale: torch.Tensor,
    v_descale: torch.Tensor, *, seqused_q: torch.Tensor | None = None, seqused_kv: torch.Tensor | None = None,
    metadata: torch.Tensor | None = None, layout_q: str = "BSND", layout_kv: str = "BSND", layout_out: str = "BSND",
    softmax_scale: float = 1.0, mask_mode: int = 1, return_softmax_lse: int = 0, **asked: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """mindiesd's float4: rows up to seqused take part, the zeros of a padding too. The output is bfloat16."""
    _on_a5(PACKED4)
    modes = tuple(asked[name] for name in ("q_quant_mode", "k_quant_mode", "v_quant_mode"))
    require_op(modes == FOUR_BIT_MODES, PACKED4, f"quant modes {modes}")
    require_op(metadata is not None and seqused_q is not None and seqused_kv is not None, PACKED4, "metadata", 161001)
    windows = [asked.get(name, -1) for name in ("win_left", "win_right")]
    free = all(number in (-1, NOTHING) for number in windows)
    other = [name for name in ("block_table", "sinks", "attn_mask", "cu_seqlens_q") if asked.get(name) is not None]
    if other or mask_mode or not free or return_softmax_lse:
        raise NotImplementedError(f"(emulator) quant_flash_attn: masks, windows, pages, LSE ({other}, {windows})")
    v_axis = 2 if layout_kv == "BNSD" else 1
    q, k = quantise.from_groups(query, q_descale, -1), quantise.from_groups(key, k_descale, -1)
    v = quantise.from_groups(value, v_descale, v_axis)
    q, k, v = (layouts.bnsd(layout, t, 0) for layout, t in ((layout_q, q), (layout_kv, k), (layout_kv, v)))
    out = layouts.unwritten(layout_out, *q.shape[:3], v.shape[3], torch.empty(0, dtype=torch.bfloat16))
    rows = layouts.bnsd(layout_out, out, 0)
    for index, (queries, keys) in enumerate(zip(seqused_q.tolist(), seqused_kv.tolist(), strict=True)):
        answer = attend(q[index, :, :queries], k[index, :, :keys], v[index, :, :keys], Terms(softmax_scale))
        rows[index, :, :queries] = answer.out.to(out.dtype)
    return out, torch.full((1,), float("nan"))


def _on_a5(op: str) -> None:
    require_op(current().soc == "A5", op, f"not on {current().soc}")


def _modes(asked: dict[str, Any]) -> tuple[int, ...]:
    return tuple(asked.get(f"{name}_quant_mode", 0) for name in ("query", "key", "value"))


def _refuse(op: str, asked: dict[str, Any]) -> None:
    given = [name for name in _NEITHER if asked.get(name) not in (None, False)]
    require_op(not given, op, f"{', '.join(given)} with eight-bit codes")
    require_op(asked.get("sparse_mode", 0) == 0, op, f"sparse_mode {asked.get('sparse_mode')} takes a mask")


def _attended(
    op: str, numbers: list[torch.Tensor], documents: list[tuple[slice, slice]], asked: dict[str, Any], layout: str
) -> torch.Tensor:
    """The output in `layout`, of out_dtype; float16 where none is asked."""
    q, k, v = (layouts.bnsd(layout, t, 0) for t in numbers)
    heads, kv_heads = asked.get("num_query_heads", 1), asked.get("num_key_value_heads") or asked.get("num_query_heads")
    fits = q.shape[1] == heads and k.shape[1] == v.shape[1] == kv_heads and heads % kv_heads == 0
    require_op(fits, op, f"{heads} and {kv_heads} heads, tensors of {q.shape[1]} and {k.shape[1]}", 161002)
    require_op(q.shape[3] == k.shape[3] and k.shape[2] == v.shape[2], op, "query, key and value do not fit", 161002)
    kind = asked.get("out_dtype")
    kind = dtypes.of(kind) if isinstance(kind, int) else kind
    like = torch.empty(0, dtype=kind or torch.float16)
    out = layouts.unwritten(layout, 1, heads, q.shape[2], v.shape[3], like)
    rows = layouts.bnsd(layout, out, heads)
    band = sparse.Band(asked.get("pre_tokens", NOTHING), asked.get("next_tokens", NOTHING))
    for queries, keys in documents:
        parts = (q[0, :, queries], k[0, :, keys], v[0, :, keys])
        drop = None
        if band != (NOTHING, NOTHING):
            lint(False, f"{op}: whether the kernel takes pre_tokens and next_tokens is not known")
            drop = sparse.outside(parts[0].shape[1], parts[1].shape[1], band, 0)[None]
        rows[0, :, queries] = attend(*parts, Terms(asked.get("softmax_scale", 1.0), drop)).out.to(out.dtype)
    return out
