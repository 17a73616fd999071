"""What npu_fused_infer_attention_score refuses of its tensors and lengths, and the facts of an allowed call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.emulators.npu import fia_masks, fia_pages, layouts
from tests.emulators.npu.fia_layouts import LAYOUTS, PACKED, UNANSWERED
from tests.emulators.npu.stack import current, require, require_op

OP = "aclnnFusedInferAttentionScoreV3"
#: The longest row of keys of the kernel for one query.
STEP_KEYS = 262144


class Facts(NamedTuple):
    """Sizes, each batch row's or document's (Sq, Skv), and its rows in q and, unless paged, in k."""

    layout: str
    out_layout: str
    heads: int
    kv_heads: int
    v_dim: int
    packed: bool
    step: bool  #: one query a row: the decode kernel
    lengths: list[tuple[int, int]]
    q_rows: list[slice]
    k_rows: list[slice]
    averages: bool  #: a stack whose answer is the mean of V


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]) -> Facts:
    """RuntimeError for what the op refuses."""
    heads, mode = asked["num_heads"], asked["sparse_mode"]
    require(heads > 0, f"num_heads must be greater than 0, got {heads}")
    require(asked["input_layout"] in LAYOUTS, f"input_layout {asked['input_layout']} is none of {(*LAYOUTS,)}")
    if asked["input_layout"] in UNANSWERED:
        raise NotImplementedError(f"(emulator) input_layout {asked['input_layout']}")
    layout, out_layout = LAYOUTS[asked["input_layout"]]
    packed, paged = layout in PACKED, asked["block_table"] is not None
    kv_heads = asked["num_key_value_heads"] or heads
    q4 = _check_query(q, k, v, layout, heads, kv_heads)
    if paged:
        v_dim = fia_pages.check(layout, q4, kv_heads, k, v, asked)
    else:
        k4, v4 = (layouts.bnsd(layout, t, kv_heads) for t in (k, v))
        fits = k4.shape[:3] == v4.shape[:3] and k4.shape[1] == kv_heads and k4.shape[3] == q4.shape[3]
        require_op(fits and k4.shape[0] == q4.shape[0], OP, "key and value do not fit the query", 161002)
        v_dim = v4.shape[3]
    lengths = _lengths(q4, None if paged else k4.shape[2], packed, asked)
    step = not packed and q4.shape[2] == 1
    if packed:
        _check_packed(q4, kv_heads, lengths, v_dim, asked)
    require_op(packed or asked["learnable_sink"] is None, OP, "learnable_sink is for TND and NTD_TND only")
    longest = max((keys for _, keys in lengths), default=0)
    require_op(not step or longest <= STEP_KEYS, OP, f"{longest} keys > {STEP_KEYS}")
    fia_masks.check(asked, lengths, step)
    if step and paged and asked["atten_mask"] is not None:
        fia_pages.check_step_mask(asked)
    q_rows = layouts.slices_of([a for a, _ in lengths]) if packed else [slice(0, a) for a, _ in lengths]
    k_rows = layouts.slices_of([b for _, b in lengths]) if packed else [slice(0, b) for _, b in lengths]
    averages = packed and mode == 0 and not current().kernels.tnd_without_mask
    return Facts(layout, out_layout, heads, kv_heads, v_dim, packed, step, lengths, q_rows, k_rows, averages)


def _check_query(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, heads: int, kv_heads: int
) -> torch.Tensor:
    """The query as [B,N,S,D]."""
    require_op(q.dim() == layouts.RANK[layout], OP, f"query of {q.dim()} axes and layout {layout}", 161002)
    fits = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    require_op(fits, OP, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: float16 or bfloat16, all equal", 161002)
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require_op(tensor.is_contiguous(), OP, f"(emulator) {name} is not contiguous: no answer is promised")
    fits = heads % kv_heads == 0 and heads // kv_heads <= 64 and heads <= 256
    require_op(fits, OP, f"{heads} query heads and {kv_heads} key heads", 161002)
    q4 = layouts.bnsd(layout, q, heads)
    batch, found, _, dim = q4.shape
    require_op(found == heads, OP, f"num_heads {heads} and a query of {found} heads", 161002)
    require_op(dim <= 512 and dim % 16 == 0, OP, f"head dim {dim}: a multiple of 16, <= 512")
    require_op(batch <= 65536, OP, f"B {batch} > 65536")
    wide = layout in ("BSH", "BSND") and heads * dim > 65535
    require_op(not wide, OP, f"{layout}: N*D {heads * dim} > 65535")
    return q4


def _lengths(q4: torch.Tensor, keys: int | None, packed: bool, asked: dict[str, Any]) -> list[tuple[int, int]]:
    q_given, k_given = asked["actual_seq_lengths"], asked["actual_seq_lengths_kv"]
    paged = keys is None
    if packed:
        require_op(bool(q_given) and bool(k_given), OP, "TND takes both lists of lengths")
        require_op(len(q_given) == len(k_given) <= 4096, OP, f"TND: {len(q_given)} and {len(k_given)} lengths")
        for ends in (q_given, k_given if not paged else [0]):
            require_op(list(ends) == sorted(ends) and ends[0] >= 0, OP, f"TND: {ends} falls")
        require_op(q_given[-1] == q4.shape[2], OP, f"TND: the last end {q_given[-1]} is not T {q4.shape[2]}")
        require_op(paged or k_given[-1] == keys, OP, f"TND: the last key end {k_given[-1]} is not T {keys}")
        k_lengths = list(k_given) if paged else layouts.lengths_of(k_given)
        return list(zip(layouts.lengths_of(q_given), k_lengths, strict=True))
    batch, sides = q4.shape[0], []
    require_op(not paged or k_given is not None, OP, "a block table takes actual_seq_lengths_kv")
    for given, full in ((q_given, q4.shape[2]), (k_given, keys)):
        numbers = [full] * batch if given is None else list(given)
        require_op(len(numbers) == 1 or len(numbers) >= batch, OP, f"{len(numbers)} lengths for {batch} rows")
        numbers = numbers * batch if len(numbers) == 1 else numbers[:batch]
        require_op(all(n >= 0 and (full is None or n <= full) for n in numbers), OP, f"lengths {numbers}, S {full}")
        sides.append(numbers)
    return list(zip(*sides, strict=True))


def _check_packed(
    q4: torch.Tensor, kv_heads: int, lengths: list[tuple[int, int]], v_dim: int, asked: dict[str, Any]
) -> None:
    known, (_, heads, _, dim), mode = current().kernels, q4.shape, asked["sparse_mode"]
    require_op(dim in known.tnd_head_dims, OP, f"TND: queryD {dim} is none of {sorted(known.tnd_head_dims)}")
    require_op(v_dim == dim or (dim, v_dim) == (192, 128), OP, f"TND: head dims {dim} and {v_dim}")
    require_op(v_dim != 192 or heads == kv_heads, OP, f"TND: {heads} and {kv_heads} heads with value head dim 192")
    require_op(q4.dtype == torch.bfloat16 or known.tnd_fp16, OP, "TND: bfloat16 only on this CANN")
    precise = (0,) if q4.dtype == torch.bfloat16 else (0, 1)
    require_op(asked["inner_precise"] in precise, OP, f"TND, {q4.dtype}: inner_precise {asked['inner_precise']}")
    require_op(mode in (0, 3, 4), OP, f"TND: sparse_mode {mode}")
    require_op(mode != 0 or asked["atten_mask"] is None, OP, "TND: sparse_mode 0 takes no mask")
    require_op(mode != 3 or all(a <= b for a, b in lengths), OP, "TND, sparse_mode 3: more queries than keys")
    require_op(mode != 4 or v_dim in (64, 128), OP, f"TND, sparse_mode 4: value head dim {v_dim}")
    require_op(asked["pse_shift"] is None, OP, "TND takes no pse_shift")
    sink = asked["learnable_sink"]
    if sink is not None:
        fits = tuple(sink.shape) == (heads,) and sink.dtype == torch.bfloat16 and v_dim in (64, 128)
        require_op(fits, OP, f"learnable_sink must be bfloat16 [{heads}], with value head dims 64 or 128")
        require_op(asked["input_layout"] in ("TND", "NTD_TND"), OP, "learnable_sink is for TND and NTD_TND only")
        require_op(known.sink, OP, "this CANN does not support learnable_sink")
