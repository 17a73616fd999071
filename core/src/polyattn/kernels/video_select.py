"""Which blocks each block of a video attends to, and the coarse branch: torch in and torch out.

Means of blocks, their products, and the highest of them straight to lists; no map of all pairs is made but the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyattn.kernels.launch import architecture_of, launch
from polyattn.kernels.score_factors import score_factors
from polyattn.kernels.video_fine import sign_of
from polyattn.kernels.video_select_kernels import choose_kernel, pool_kernel, score_kernel
from polyattn.kernels.video_tiles import POOL_WARPS, POOLED, choose_tile, choose_warps, power_of_two


class Chosen(NamedTuple):
    """lists int32 [B,H,n,prefix+kept] and counts [B,H,n], rows before `prefix` unwritten; coarse float32 [B,H,n,V]."""

    lists: torch.Tensor | None
    counts: torch.Tensor | None
    coarse: torch.Tensor | None


def select(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    prefix: int,
    kept: int,
    scale: float,
) -> Chosen:
    """The first `prefix` blocks and the `kept` of the others with the highest scores, for each block behind `prefix`.

    q [B,S,H,D], k [B,S,Hk,D], v [B,S,Hk,V] or None, which leaves out the coarse branch; `order` and `starts` [n+1] as
    `VideoTiles` has them. With as many kept as there are nothing is chosen: lists are None.
    """
    blocks = starts.shape[0] - 1
    all_kept = kept >= blocks - prefix
    if all_kept and v is None:
        return Chosen(None, None, None)
    means = [pooled(tensor, order, starts) for tensor in (q, k)]
    values = None if v is None else pooled(v, order, starts)
    scores, coarse = score(means[0], means[1], values, scale=scale, need_scores=not all_kept)
    if scores is None:
        return Chosen(None, None, coarse)
    return Chosen(*choose(scores, prefix=prefix, kept=kept), coarse)


def pooled(x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Means of the rows of each block of x [B,S,H,D]: float32 [B,H,n,D]."""
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    samples, _, heads, size = x.shape
    blocks = starts.shape[0] - 1
    means = torch.empty(samples, heads, blocks, size, dtype=torch.float32, device=x.device)
    steps = [0 if extent == 1 else step for extent, step in zip(x.shape[:3], x.stride(), strict=False)]
    unit = 16 // x.element_size()
    unit = unit if all(step % unit == 0 for step in steps) else 1
    width = max(16, power_of_two(size))
    launch(
        pool_kernel, (blocks * heads * samples,), x.device,
        x, means, order, starts, *(step // unit for step in steps), blocks, heads,
        SIZE=size, WIDTH=width, ROWS=POOLED // width, UNIT=unit, num_warps=POOL_WARPS,
    )  # fmt: skip
    return means


def score(
    q_means: torch.Tensor, k_means: torch.Tensor, v_means: torch.Tensor | None, *, scale: float, need_scores: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Products of means [B,H,n,D] and [B,Hk,n,D] by the sign of `scale`: float32 [B,H,n,n], if they are needed.

    With v_means [B,Hk,n,V] the coarse branch, too: softmax(scale * products) @ v_means, float32 [B,H,n,V].
    """
    samples, heads, blocks, head_dim = q_means.shape
    v_dim = head_dim if v_means is None else v_means.shape[3]
    scores = q_means.new_empty(samples, heads, blocks, blocks) if need_scores else None
    coarse = None if v_means is None else q_means.new_empty(samples, heads, blocks, v_dim)
    tile = choose_tile(architecture_of(q_means.device), max(head_dim, v_dim))
    factors = score_factors(abs(scale) or 1.0, 0.0, 4)
    tiles = -(-blocks // tile.rows)
    launch(
        score_kernel, (tiles * heads * samples,), q_means.device,
        q_means, k_means, v_means, scores, coarse, blocks, tiles, heads, heads // k_means.shape[1], factors.outer,
        D=head_dim, V=v_dim, BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_V=max(16, power_of_two(v_dim)),
        ROWS=tile.rows, COLUMNS=tile.columns, SIGN=sign_of(scale), TF32=tile.tf32,
        num_warps=tile.warps, num_stages=2, enable_fp_fusion=factors.fused,
    )  # fmt: skip
    return scores, coarse


def choose(scores: torch.Tensor, *, prefix: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [B,H,n,n] -> lists int32 [B,H,n,prefix+kept], ascending, and counts [B,H,n], of the rows behind `prefix`.

    Exact for any scores; the lowest index wins ties, NaN counts as -inf. 0 < kept < n - prefix.
    """
    samples, heads, blocks, _ = scores.shape
    width, rows = prefix + kept, blocks - prefix
    lists = torch.empty(samples, heads, blocks, width, dtype=torch.int32, device=scores.device)
    counts = torch.empty(samples, heads, blocks, dtype=torch.int32, device=scores.device)
    columns = power_of_two(rows)
    launch(
        choose_kernel, (samples * heads * rows,), scores.device,
        scores, lists, counts, blocks, prefix, kept, width, rows, BLOCK=columns, num_warps=choose_warps(columns),
    )  # fmt: skip
    return lists, counts
