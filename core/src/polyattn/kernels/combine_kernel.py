"""The Triton kernel that puts the splits of attention's keys together, always in the same order."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=(
        "splits", "all_tokens", "tokens", "heads", "out_batch", "out_token", "out_head",
    )
)  # fmt: skip
def combine_splits_kernel(
    part, part_lse, out, lse, splits, all_tokens, tokens, heads,
    out_batch, out_token, out_head,
    V_DIM: tl.constexpr, UNIT: tl.constexpr, OUT_STEP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """part [splits, all_tokens, heads, V_DIM] by its LSE (base two) to out, `tokens` a sample, and to lse (natural).

    A split that saw no key has LSE -inf, and its part is not read.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_V)
    inside = rows < all_tokens.to(tl.int64) * heads
    step = all_tokens.to(tl.int64) * heads
    stop = step * splits
    peak = tl.zeros([BLOCK_R], tl.float32) + float("-inf")
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in range(0, splits, AHEAD):
        for ahead in tl.static_range(AHEAD):
            place = (start + ahead) * step + rows
            log = tl.load(part_lse + place, mask=inside & (place < stop), other=float("-inf"))
            new_peak = tl.maximum(peak, log)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            fade = tl.exp2(peak - base)
            weight = tl.exp2(log - base)
            seen = (log != float("-inf"))[:, None] & (columns < V_DIM)[None, :]
            values = tl.load(part + (place * V_DIM)[:, None] + columns[None, :], mask=seen, other=0.0)
            acc = acc * fade[:, None] + values * weight[:, None]
            total = total * fade + weight
            peak = new_peak
    answered = total != 0.0
    total = tl.where(answered, total, 1.0)
    acc = tl.where(answered[:, None], acc / total[:, None], 0.0)
    token = rows // heads
    head = rows % heads
    sample = token // tokens
    query = token % tokens
    places = (sample * out_batch + query * out_token + head * out_head) * UNIT
    stores = inside[:, None] & (columns < V_DIM)[None, :]
    tl.store(out + places[:, None] + (columns * OUT_STEP)[None, :], acc.to(out.dtype.element_ty), mask=stores)
    if lse is not None:
        log = tl.where(answered, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + (sample * heads + head) * tokens + query, log, mask=inside)
