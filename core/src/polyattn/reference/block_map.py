"""BlockMap: a query block sees the key blocks that its list names, and of each its real rows."""

from __future__ import annotations

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.structures import BlockMap


def block_map(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: BlockMap, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq]."""
    queries, keys = q.shape[1], k.shape[1]
    block_of_query = torch.arange(queries, device=q.device) // structure.block_q
    block_of_key = torch.arange(keys, device=q.device) // structure.block_k
    visible = _kept_blocks(structure, -(-keys // structure.block_k)).to(q.device)
    visible = visible[:, :, block_of_query][..., block_of_key]
    if structure.sizes is not None:
        place = torch.arange(keys, device=q.device) % structure.block_k
        visible = visible & (place < structure.sizes.to(q.device)[block_of_key])
    return masked_softmax(q, k, v, visible & rule.positions(queries, keys, q.device), rule)


def _kept_blocks(structure: BlockMap, key_blocks: int) -> torch.Tensor:
    """Bool [B|1,H|1,Nq,Nk]: entries past the count, and blocks that do not exist, keep nothing."""
    lists = structure.lists
    listed = torch.arange(lists.shape[-1], device=lists.device) < structure.counts[..., None]
    block = torch.arange(key_blocks, device=lists.device)
    return ((lists[..., None] == block) & listed[..., None]).any(dim=-2)
