"""What npu_fused_infer_attention_score refuses of masks, sparse modes and biases, and what of a row a mask hides."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu import sparse
from tests.emulators.npu.stack import lint, require_op

OP = "aclnnFusedInferAttentionScoreV3"
#: The keys that a mask of one row, which is taken in the place of Sq rows, really hides.
SHORT = 512
COMPRESSED = (2, 3, 4)


def check(asked: dict[str, Any], lengths: list[tuple[int, int]], step: bool) -> None:
    """RuntimeError for what the op refuses; `step`: one query a row, which ignores the sparse mode."""
    mask, mode = asked["atten_mask"], asked["sparse_mode"]
    require_op(
        asked["inner_precise"] in ((0, 1) if step else (0, 1, 2, 3)), OP, f"inner_precise {asked['inner_precise']}"
    )
    require_op(mode in (0, 1, 2, 3, 4), OP, f"sparse_mode {mode}")
    require_op(mask is not None or mode == 0 or step, OP, f"sparse_mode {mode} takes a mask")
    if asked["pse_shift"] is not None:
        _check_bias(asked, lengths)
    if mask is None:
        free = asked["pre_tokens"] >= _most(lengths, 0) and asked["next_tokens"] >= _most(lengths, 1)
        lint(free, "without atten_mask, pre/next_tokens are ignored: full attention")
        return
    fits = mask.dtype in (torch.bool, torch.int8, torch.uint8)
    require_op(fits, OP, f"atten_mask is {mask.dtype}, not bool, int8 or uint8", 161002)
    if step:
        batch = mask.dim() in (2, 3, 4) and mask.shape[0] == len(lengths)
        fits = batch and mask.shape[-1] >= _most(lengths, 1)
        require_op(fits, OP, f"atten_mask {tuple(mask.shape)} and {len(lengths)} rows of one query", 561002)
        return
    if mode in (0, 4):
        _check_band(asked, lengths)
    if mode in COMPRESSED:
        side, shape = sparse.SIDE, tuple(mask.shape)
        fits = shape in ((side, side), (1, side, side), (1, 1, side, side))
        require_op(fits, OP, f"sparse_mode {mode} takes an atten_mask of {side}x{side}, not {shape}")
        require_op(sparse.is_compressed(mask), OP, "(emulator) a compressed mask not triu(1)")
        return
    most = (_most(lengths, 0), _most(lengths, 1))
    if is_short(mask):
        lint(False, f"atten_mask {tuple(mask.shape)}: a single row is taken, and not read past key {SHORT}")
        most = (1, most[1])
    fits = mask.dim() in (2, 3, 4) and mask.shape[-1] >= most[1] and mask.shape[-2] >= most[0]
    fits = fits and (mask.dim() == 2 or mask.shape[0] in (1, len(lengths)))
    require_op(fits, OP, f"atten_mask {tuple(mask.shape)} does not cover {most}", 561002)


def _most(lengths: list[tuple[int, int]], side: int) -> int:
    return max((pair[side] for pair in lengths), default=0)


def _check_bias(asked: dict[str, Any], lengths: list[tuple[int, int]]) -> None:
    bias, most = asked["pse_shift"], (_most(lengths, 0), _most(lengths, 1))
    fits = bias.dim() == 4 and bias.shape[0] in (1, len(lengths)) and bias.shape[1] == asked["num_heads"]
    fits = fits and bias.shape[3] >= most[1] and (bias.shape[2] >= most[0] or bias.shape[2] == 1)
    require_op(fits, OP, f"pse_shift {tuple(bias.shape)}")
    lint(not bool(bias.isneginf().any()), "pse_shift with -inf gives NaN")


def _check_band(asked: dict[str, Any], lengths: list[tuple[int, int]]) -> None:
    pre, after = asked["pre_tokens"], asked["next_tokens"]
    words = f"pre_tokens {pre} and next_tokens {after}"
    require_op(pre >= 0 or after >= 0, OP, f"{words} are both negative")
    require_op(-after <= pre, OP, f"{words}: nothing is between them")
    for queries, keys in lengths:
        empty = (after < 0 and -after >= queries) or (pre < 0 and -pre >= keys)
        require_op(not empty, OP, f"{words} leave nothing of {queries} x {keys}")


def is_short(mask: torch.Tensor) -> bool:
    """A 4-D mask of one row."""
    return mask.dim() == 4 and mask.shape[2] == 1


def hidden(asked: dict[str, Any], index: int, queries: int, keys: int, step: bool) -> torch.Tensor:
    """Bool [1,Sq,Skv] that the mask of one batch row or document hides."""
    mask, mode = asked["atten_mask"], asked["sparse_mode"]
    band = sparse.Band(asked["pre_tokens"], asked["next_tokens"])
    if mode in COMPRESSED and not step:
        return sparse.hidden(mode, queries, keys, band, mask, None)
    if mask.dim() == 4:
        full = mask[index if mask.shape[0] > 1 else 0, 0]  # its heads are not looked at
    elif mask.dim() == 3:
        full = mask[index if mask.shape[0] > 1 else 0]
    else:
        full = mask[index : index + 1] if step else mask
    drop = full.bool()[:queries, :keys][None]
    if step:
        return drop
    if is_short(mask):
        drop = drop & (torch.arange(keys) < SHORT)
    return drop | sparse.outside(queries, keys, band, 0) if mode == 0 else drop
