"""MindIE-SD's quant_attention: fp8, mxfp8 and mxfp4, with what each leaves to its caller."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch.nn.functional import pad

from polyattn.vendor import Quant, Result, Window, positive_scale, prefix, warn, written
from polyattn_npu.mindie_forward import only_plain
from polyattn_npu.mindie_package import package
from polyattn_npu.options import LAYOUT, npu_options
from polyattn_npu.quant_rotation import rotation

#: mxfp8 packs samples and groups this many values along them: a group must not reach into the next sample.
_GROUP = 32
#: mxfp4 fills keys up to a multiple of this, and counts the zeros that it puts there.
_FILLED = 512


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
    """Every query over every key, in the precision asked for."""
    only_plain(causal, window, softcap, need_lse)
    quant = options[-1]  # what the core puts last among a quantised call's options
    assert isinstance(quant, Quant)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    layout = npu_options(options).op_layout or LAYOUT
    matrix = rotation(q.device, q.dtype, q.shape[-1]) if quant.rotate else None
    attend = _uncounted if quant.method == "mxfp4" else partial(_quantised, quant.method)
    call = partial(attend, layout, scale, matrix)
    if q.shape[0] > 1 and _alone(quant.method, k.shape[1]):
        result = torch.cat([call(*sample) for sample in zip(q.split(1), k.split(1), v.split(1), strict=True)])
    else:
        result = call(q, k, v)
    result = result.to(q.dtype)  # the kernel of mxfp4 writes bfloat16, whatever q is
    return written(out, result), None


prefix_kv = partial(prefix, dense)


def _alone(method: str, keys: int) -> bool:
    """Whether a sample needs a call of its own."""
    return method == "fp8" or (method == "mxfp8" and keys % _GROUP != 0)


def _quantised(
    method: str,
    layout: str,
    scale: float,
    matrix: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """One call: q [B,Sq,H,D], k and v [B,Sk,Hk,D] -> [B,Sq,H,D]."""
    if layout == "BNSD":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    result: torch.Tensor = package().quant_attention(
        q, k, v, precision=method, layout=layout, scale=float(scale), q_rot=matrix, k_rot=matrix
    )
    return result.transpose(1, 2) if layout == "BNSD" else result


def _uncounted(
    layout: str,
    scale: float,
    matrix: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """mxfp4 by `_quantised`, without the share of the softmax of keys that are not there: their scores are 0.

    A column of ones beside the values is the share of the real keys, and is divided out. That is exact: a 1 has a code
    of its own, whatever precision the weights have inside is that of both columns, and where nothing is filled up, by
    a build to come, the column is 1. Without their mean the keys' scores are 0 on average, which the softmax does not
    see: of n keys the share is then n/(n+511) at least, where it would vanish if all scores were well below 0.
    """
    if k.shape[1] % _FILLED == 0:
        return _quantised("mxfp4", layout, scale, matrix, q, k, v)
    _tell_once()
    if matrix is not None:
        q, k = q @ matrix, k @ matrix
    full = k.float()
    k = (full - full.mean(dim=1, keepdim=True)).to(k.dtype)
    width = q.shape[-1]
    ones = pad(pad(v, (0, 1), value=1.0), (0, width - 1))
    wide = _quantised("mxfp4", layout, scale, None, pad(q, (0, width)), pad(k, (0, width)), ones).float()
    return wide[..., :width] / wide[..., width : width + 1]


@lru_cache(maxsize=1)
def _tell_once() -> None:
    warn(
        f"npu:quant runs mxfp4 at twice the head dim: MindIE-SD fills keys up to a multiple of {_FILLED} with zeros "
        f"that take part, which a column beside the values undoes; a multiple of {_FILLED} keys is taken as it is"
    )
