"""npu_fused_infer_attention_score, both versions, on plain tensors: dense, packed (TND) and paged, with its LSE."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu import fia_masks, fia_pages, layouts, quant_ops
from tests.emulators.npu.fia_checks import Facts, check
from tests.emulators.npu.numerics import Terms, attend

NOTHING = 2147483647
DEFAULTS: dict[str, Any] = {
    "pse_shift": None, "atten_mask": None, "actual_seq_lengths": None, "actual_seq_lengths_kv": None,
    "block_table": None, "num_heads": 1, "scale": 1.0, "pre_tokens": NOTHING, "next_tokens": NOTHING,
    "input_layout": "BSH", "num_key_value_heads": 0, "sparse_mode": 0, "inner_precise": 0, "block_size": 0,
    "softmax_lse_flag": False, "learnable_sink": None,
}  # fmt: skip
#: The second version's name of an argument -> the first one's.
V2 = {
    "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads", "softmax_scale": "scale", "return_softmax_lse": "softmax_lse_flag",
}  # fmt: skip


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second version: other names, and learnable_sink."""
    if asked.get("query_quant_mode"):
        return quant_ops.grouped(query, key, value, **asked)
    named = {V2.get(name, name): given for name, given in asked.items()}
    return npu_fused_infer_attention_score(query, key, value, **named)


def npu_fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE float32 [B,N,Sq,1], packed [T,N,1]; without the flag one number that means nothing)."""
    other = sorted(name for name, number in given.items() if name not in DEFAULTS and number not in (None, 0))
    if other:
        raise NotImplementedError(f"(emulator) {', '.join(other)} of npu_fused_infer_attention_score")
    asked = DEFAULTS | {name: number for name, number in given.items() if name in DEFAULTS}
    facts = check(query, key, value, asked)
    heads = facts.heads
    q = layouts.bnsd(facts.layout, query, heads)
    like = torch.empty(0, dtype=query.dtype)
    out = layouts.unwritten(facts.out_layout, q.shape[0], heads, q.shape[2], facts.v_dim, like)
    rows = layouts.bnsd(facts.out_layout, out, heads)
    lse = torch.full((q.shape[0], heads, q.shape[2]), float("nan"))
    for index, (queries, keys) in enumerate(facts.lengths):
        place = 0 if facts.packed else index
        part = facts.q_rows[index]
        k, v = _keys(facts, asked, key, value, index)
        if queries:
            answer = attend(q[place, :, part], k, v, _terms(facts, asked, index, queries, keys))
            rows[place, :, part] = answer.out.to(out.dtype)
            lse[place, :, part] = (answer.maximum + answer.total.log()).float()
    if not asked["softmax_lse_flag"]:
        return out, torch.full((1,), float("nan"))
    return out, lse[0].transpose(0, 1)[..., None].contiguous() if facts.packed else lse[..., None]


def _keys(
    facts: Facts, asked: dict[str, Any], key: torch.Tensor, value: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[Nk,Skv,D] of one batch row or document."""
    if asked["block_table"] is None:
        place = 0 if facts.packed else index
        k, v = (layouts.bnsd(facts.layout, t, facts.kv_heads)[place, :, facts.k_rows[index]] for t in (key, value))
        return k, v
    table, length, size = asked["block_table"][index], facts.lengths[index][1], asked["block_size"]
    k, v = (fia_pages.rows_of(pool, table, length, size, facts.kv_heads) for pool in (key, value))
    return k, v


def _terms(facts: Facts, asked: dict[str, Any], index: int, queries: int, keys: int) -> Terms:
    bias = asked["pse_shift"]
    if bias is not None:
        bias = bias[index if bias.shape[0] > 1 else 0][..., :queries, :keys]
    if facts.averages:
        return Terms(0.0)
    if asked["atten_mask"] is None:
        return Terms(asked["scale"], after=bias, sink=asked["learnable_sink"])
    drop = fia_masks.hidden(asked, index, queries, keys, facts.step)
    shifted = asked["sparse_mode"] == 3 and not facts.packed and queries > keys
    zeroed = bool(asked["inner_precise"] & 2) or shifted
    return Terms(asked["scale"], drop, after=bias, sink=asked["learnable_sink"], zeroed=zeroed)
