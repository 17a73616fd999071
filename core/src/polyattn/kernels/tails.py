"""Documents whose values are followed by NaN or infinity: what a kernel that loads whole tiles multiplies by 0.

Vendors' kernels give a hidden key the weight 0, but read its value all the same where it shares a tile with the last
keys of a document, and 0 * NaN is NaN. `repair` computes such documents anew with a kernel that never reads what is
hidden; where nothing is strange, which is almost always, it costs two launches that find nothing to do.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from polyattn.kernels import flash, tails_tiles
from polyattn.kernels.flash import Scoring, Visibility, Window
from polyattn.kernels.launch import Prepared, launch_prepared, prepare
from polyattn.kernels.tails_kernel import tails_kernel


def strange_tails(v: torch.Tensor, ends: torch.Tensor, reach: int) -> torch.Tensor:
    """int32 [documents] on the device: 1 where one of the `reach` rows behind ends[d] (int32) is not finite.

    v [documents,S,H,D], or [1,T,H,D], whose documents share one axis of rows.
    """
    flags = torch.zeros(ends.shape[0], dtype=torch.int32, device=v.device)
    looking = _prepared(v.shape, v.stride(), ends.stride(0), reach)
    launch_prepared(looking, (ends.shape[0], -(-reach // tails_tiles.ROWS)), v.device, v, ends, flags)
    return flags


@lru_cache(maxsize=1024)
def _prepared(shape: torch.Size, stride: tuple[int, ...], ends_stride: int, reach: int) -> Prepared:
    """The launch but for its tensors."""
    apart = 0 if shape[0] == 1 else stride[0]
    return prepare(
        tails_kernel, apart, *stride[1:], ends_stride, shape[1], reach,
        HEADS=shape[2], DIM=shape[3], ROWS=tails_tiles.ROWS, COLUMNS=tails_tiles.COLUMNS, num_warps=tails_tiles.WARPS,
    )  # fmt: skip


def repair_samples(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: tuple[bool, float, Window, float],
    *,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor,
    reach: int,
) -> None:
    """In place: samples of out [B,Sq,H,Dv] and lse [B,H,Sq] with strange values behind their used_k[b] keys.

    scoring: causal, scale, window, softcap.
    """
    marked = strange_tails(v, used_k, reach)
    seen = Visibility(used_q=used_q, used_k=used_k, only_if=marked)
    flash.batched(q, k, v, out, Scoring(*scoring), seen, need_lse=lse is not None, lse=lse)


def repair_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: tuple[bool, float, Window, float],
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    reach: int,
) -> None:
    """In place: documents of out [T,H,Dv] and lse [H,T] with strange values behind their last key.

    scoring: causal, scale, window, softcap.
    """
    marked = strange_tails(v.unsqueeze(0), cu_k[1:], reach)
    seen = Visibility(only_if=marked)
    flash.packed(
        q, k, v, out, Scoring(*scoring), seen, cu_q=cu_q, cu_k=cu_k, max_q=max_q, need_lse=lse is not None, lse=lse
    )  # fmt: skip
