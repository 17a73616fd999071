"""What npu_fused_infer_attention_score refuses, and the facts of an allowed call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.emulators.npu import layouts, sparse
from tests.emulators.npu.stack import current, lint, require, require_op

OP = "aclnnFusedInferAttentionScoreV3"
NOTHING = 2147483647
#: The keys that a mask of one row, which is taken in the place of Sq rows, really hides.
SHORT = 512
LAYOUTS = ("BSH", "BSND", "BNSD", "TND")


class Facts(NamedTuple):
    """Sizes, each batch row's or document's (Sq, Skv), and its rows in q and, unless paged, in k."""

    layout: str
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
    layout, heads, mode = asked["input_layout"], asked["num_heads"], asked["sparse_mode"]
    require(layout in LAYOUTS, f"input_layout {layout} is none of {LAYOUTS} (the emulator's; the op has more)")
    require(heads > 0, f"num_heads must be greater than 0, got {heads}")
    require_op(q.dim() == layouts.RANK[layout], OP, f"query of {q.dim()} axes and layout {layout}", 161002)
    fits = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    require_op(fits, OP, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: float16 or bfloat16, all equal", 161002)
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require_op(tensor.is_contiguous(), OP, f"(emulator) {name} is not contiguous: no answer is promised")
    kv_heads = asked["num_key_value_heads"] or heads
    fits = heads % kv_heads == 0 and heads // kv_heads <= 64 and heads <= 256
    require_op(fits, OP, f"{heads} query heads and {kv_heads} key heads", 161002)
    q4 = layouts.bnsd(layout, q, heads)
    require_op(q4.shape[1] == heads, OP, f"num_heads {heads} and a query of {q4.shape[1]} heads", 161002)
    require_op(q4.shape[3] <= 512 and q4.shape[3] % 16 == 0, OP, f"head dim {q4.shape[3]}: a multiple of 16, <= 512")
    packed, paged = layout == "TND", asked["block_table"] is not None
    if paged:
        v_dim = _check_pages(layout, q4.shape[3], kv_heads, k, v, asked)
    else:
        k4, v4 = (layouts.bnsd(layout, t, kv_heads) for t in (k, v))
        fits = k4.shape[:3] == v4.shape[:3] and k4.shape[1] == kv_heads and k4.shape[3] == q4.shape[3]
        require_op(fits and k4.shape[0] == q4.shape[0], OP, "key and value do not fit the query", 161002)
        v_dim = v4.shape[3]
    lengths = _lengths(q4, None if paged else k4.shape[2], packed, asked)
    if packed:
        _check_packed(q, lengths, v_dim, asked)
    q_rows = layouts.slices_of([a for a, _ in lengths]) if packed else [slice(0, a) for a, _ in lengths]
    k_rows = layouts.slices_of([b for _, b in lengths]) if packed else [slice(0, b) for _, b in lengths]
    step = not packed and q4.shape[2] == 1
    _check_mask(mode, asked, lengths, step)
    averages = packed and mode == 0 and not current().kernels.tnd_without_mask
    return Facts(layout, heads, kv_heads, v_dim, packed, step, lengths, q_rows, k_rows, averages)


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


def _check_packed(q: torch.Tensor, lengths: list[tuple[int, int]], v_dim: int, asked: dict[str, Any]) -> None:
    known, dim, mode = current().kernels, q.shape[2], asked["sparse_mode"]
    require_op(dim in known.tnd_head_dims, OP, f"TND: queryD {dim} is none of {sorted(known.tnd_head_dims)}")
    require_op(v_dim == dim or (dim, v_dim) == (192, 128), OP, f"TND: head dims {dim} and {v_dim}")
    require_op(q.dtype == torch.bfloat16 or known.tnd_fp16, OP, "TND: bfloat16 only on this CANN")
    require_op(mode in (0, 3, 4), OP, f"TND: sparse_mode {mode}")
    require_op(mode != 0 or asked["atten_mask"] is None, OP, "TND: sparse_mode 0 takes no mask")
    require_op(mode != 3 or all(a <= b for a, b in lengths), OP, "TND, sparse_mode 3: more queries than keys")
    require_op(asked["pse_shift"] is None, OP, "TND takes no pse_shift")


def _check_pages(layout: str, dim: int, kv_heads: int, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]) -> int:
    """The value's head dim."""
    table, size, lengths = asked["block_table"], asked["block_size"], asked["actual_seq_lengths_kv"] or []
    require_op(layout != "TND" or current().kernels.tnd_paged, OP, "TND with a block table is not on this CANN")
    require_op(table.dtype == torch.int32 and table.dim() == 2, OP, "block_table must be int32 [B, blocks]", 161002)
    fits = size > 0 and size % 128 == 0 and size <= current().kernels.fia_page
    require_op(fits, OP, f"block_size {size}: a multiple of 128, <= {current().kernels.fia_page}")
    flat = k.dim() == v.dim() == 3 and k.shape[1:] == (size, kv_heads * dim)
    headed = k.dim() == v.dim() == 4 and k.shape[1:] == (kv_heads, size, dim)
    require_op(flat or (headed and layout in ("BNSD", "TND")), OP, f"a cache of {tuple(k.shape)} with {layout}", 161002)
    require_op(len(lengths) == table.shape[0], OP, f"{len(lengths)} key lengths and a table of {table.shape[0]} rows")
    for row, length in zip(table.tolist(), lengths, strict=True):
        pages = -(-length // size)
        require_op(pages <= len(row), OP, f"{length} keys need {pages} pages, the table has {len(row)}")
        require_op(all(0 <= p < k.shape[0] for p in row[:pages]), OP, f"(emulator) a page of {row} is not in the cache")
    return v.shape[3] if headed else v.shape[2] // kv_heads


def _check_mask(mode: int, asked: dict[str, Any], lengths: list[tuple[int, int]], step: bool) -> None:
    mask, precise = asked["atten_mask"], asked["inner_precise"]
    require_op(precise in ((0, 1) if step else (0, 1, 2, 3)), OP, f"inner_precise {precise}")
    require_op(mode in (0, 1, 2, 3, 4), OP, f"sparse_mode {mode}")
    require_op(mask is not None or mode == 0 or step, OP, f"sparse_mode {mode} takes a mask")
    if asked["pse_shift"] is not None:
        bias, most = asked["pse_shift"], (max(a for a, _ in lengths), max(b for _, b in lengths))
        fits = bias.dim() == 4 and bias.shape[0] in (1, len(lengths)) and bias.shape[1] == asked["num_heads"]
        fits = fits and bias.shape[3] >= most[1] and (bias.shape[2] >= most[0] or bias.shape[2] == 1)
        require_op(fits, OP, f"pse_shift {tuple(bias.shape)}")
        lint(not bool(bias.isneginf().any()), "pse_shift with -inf gives NaN")
    if mask is None:
        return
    fits = mask.dtype in (torch.bool, torch.int8, torch.uint8)
    require_op(fits, OP, f"atten_mask is {mask.dtype}, not bool, int8 or uint8", 161002)
    if mode in (2, 3, 4):
        side, shape = sparse.SIDE, tuple(mask.shape)
        fits = shape in ((side, side), (1, side, side), (1, 1, side, side))
        require_op(fits, OP, f"sparse_mode {mode} takes an atten_mask of {side}x{side}, not {shape}")
        full = torch.ones(side, side, dtype=torch.bool).triu(1)
        require_op(torch.equal(mask.bool().reshape(side, side), full), OP, "(emulator) a compressed mask not triu(1)")
        return
    most = (1 if step else max(a for a, _ in lengths), max(b for _, b in lengths))
    if is_short(mask) and not step:
        lint(False, f"atten_mask {tuple(mask.shape)}: a single row is taken, and not read past key {SHORT}")
        most = (1, most[1])
    fits = mask.dim() in (2, 3, 4) and mask.shape[-1] >= most[1] and mask.shape[-2] >= most[0]
    fits = fits and (mask.dim() == 2 or mask.shape[0] in (1, len(lengths)))
    require_op(fits, OP, f"atten_mask {tuple(mask.shape)} does not cover {most}", 561002)


def is_short(mask: torch.Tensor) -> bool:
    """A 4-D mask of one row."""
    return mask.dim() == 4 and mask.shape[2] == 1
