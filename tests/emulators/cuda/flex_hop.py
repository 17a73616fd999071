"""Stand-in for torch's compiled flex attention on CPU tensors: float64, by the block tables, with gradients.

torch's own eager form reads the rule alone, never the tables, and has no backward here. This one computes only what the
tables list, takes blocks that they call full on their word, and checks that their two directions agree.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

VERSIONS = {"triton": "3.6.0"}


def install() -> None:
    """Put it in torch's place, and let the backend's programs run as they are, uncompiled."""
    flex.flex_attention = flex_attention
    importlib.import_module("polyattn.backends.flex_programs").compiled = lambda program: program


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: flex.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """q [B,H,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv] -> out [B,H,Sq,Dv], and the LSE [B,H,Sq] where it is asked for."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    _check(query, key, value, enable_gqa)
    group = heads // key.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (key, value))
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    i, j = torch.arange(queries).view(-1, 1), torch.arange(keys)
    scores = query.double() @ k.transpose(2, 3) * (width**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        scores = scores.masked_fill(~_visible(block_mask, (batch, heads, queries, keys), b, h, i, j), float("-inf"))
    blind = scores.isneginf().all(-1, keepdim=True)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    # heads after rows in memory, as the device's kernel lays it out beside such a q
    out = (weights @ v).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    row_lse = lse.masked_fill(blind, float("-inf")).squeeze(-1).float()
    if return_aux is not None:
        return out, flex.AuxOutput(lse=row_lse)
    return (out, row_lse) if return_lse else out


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {query.dtype} is not supported on the device")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError("Expected query, key, and value to have the same dtype")
    if min(query.shape[-1], value.shape[-1]) < 16:
        raise ValueError("NYI: embedding dimension of the query, key, and value must be at least 16")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads; try setting enable_gqa=True")
    if key.shape[2] == 0 or query.shape[2] == 0:
        raise IndexError("an empty sequence is not supported")


def _visible(
    blocks: flex.BlockMask,
    shape: tuple[int, int, int, int],
    b: torch.Tensor,
    h: torch.Tensor,
    i: torch.Tensor,
    j: torch.Tensor,
) -> torch.Tensor:
    """Bool [B,H,Sq,Sk]: what the listed blocks let through."""
    batch, heads, queries, keys = shape
    if tuple(blocks.shape[-2:]) != (queries, keys):
        raise ValueError(f"block_mask was created for {blocks.shape} but got q_len={queries} and kv_len={keys}")
    for size, given in zip((batch, heads), blocks.kv_num_blocks.shape[:2], strict=True):
        if given not in (1, size):
            raise RuntimeError(f"block_mask of {list(blocks.kv_num_blocks.shape)} does not broadcast to {list(shape)}")
    some = _listed(blocks.kv_num_blocks, blocks.kv_indices)
    every = _listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    for table, other in (
        (some, _listed(blocks.q_num_blocks, blocks.q_indices)),
        (every, _listed(blocks.full_q_num_blocks, blocks.full_q_indices)),
    ):
        if not torch.equal(table, other.transpose(2, 3)):
            raise RuntimeError("block_mask: its tables by query and by key do not agree")
    if bool((some & every).any()):
        raise RuntimeError("block_mask: a block is both full and not, which counts it twice")
    size = blocks.BLOCK_SIZE
    if bool(every[:, :, queries // size[0] :].any()) or bool(every[:, :, :, keys // size[1] :].any()):
        raise RuntimeError("block_mask: a block that reaches past the end is called full")
    if bool(some[:, :, :, -(-keys // size[1]) :].any()):
        raise RuntimeError("block_mask: a block past the last key is listed")

    def by_pair(table: torch.Tensor) -> torch.Tensor:
        return table.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, :queries, :keys]

    return by_pair(every) | (by_pair(some) & blocks.mask_mod(b, h, i, j))


def _listed(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Bool [B,H,rows,columns] of a table of places."""
    used = torch.arange(places.shape[-1]) < counts.unsqueeze(-1)
    return torch.zeros(places.shape, dtype=torch.int32).scatter_add_(-1, places.long(), used.int()) > 0
