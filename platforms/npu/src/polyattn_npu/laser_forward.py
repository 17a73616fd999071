"""MindIE-SD's laser attention: dense, prefixes of keys as views, one packed document."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from polyattn.vendor import Result, Window, document_loop, positive_scale, prefix, warn, written
from polyattn_npu import laser_range
from polyattn_npu.laser_range import input_scale
from polyattn_npu.mindie_forward import only_plain, undisturbed
from polyattn_npu.mindie_package import package
from polyattn_npu.options import LASER, npu_options


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Every query over every key. MindIE-SD runs fused_attn_score for what is too short, as a document may be."""
    only_plain(causal, window, softcap, need_lse)
    undisturbed(LASER)
    if min(q.shape[1], k.shape[1]) < laser_range.LEAST_ROWS:  # a length that routing does not know
        _tell_once()
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    factor = input_scale(npu_options(options), q.shape[-1], k.shape[1], scale)
    if factor != 1:  # a power of two: exact, but for what becomes denormal
        q, k, v = q / factor, k / factor, v / factor
    result: torch.Tensor = package().attention_forward(
        q, k, v, scale=float(scale) * factor * factor, fused=True, opt_mode="manual", op_type=LASER, layout="BNSD"
    )  # fmt: skip
    if factor != 1:
        result = result * factor
    return written(out, result), None


@lru_cache(maxsize=1)
def _tell_once() -> None:
    warn(
        f"npu:laser was given a document of fewer than {laser_range.LEAST_ROWS} rows, which MindIE-SD runs as "
        "fused_attn_score: npu:fusion and npu:mindie take such documents"
    )


prefix_kv = partial(prefix, dense)
packed = partial(document_loop, dense)
