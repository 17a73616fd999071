"""`reference_attention`: checks the arguments, then asks the structure's own file for its meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch

from polyattn.arguments import check_combination, check_gate
from polyattn.errors import UnsupportedRequest
from polyattn.reference.block_map import block_map
from polyattn.reference.dense import dense
from polyattn.reference.key_padding import key_padding
from polyattn.reference.mask import mask
from polyattn.reference.packed import packed
from polyattn.reference.paged import paged
from polyattn.reference.rule import Rule, Window, window_of
from polyattn.reference.spans import spans
from polyattn.reference.video_tiles import video_tiles
from polyattn.structures import Dense, Structure

_MEANING: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, Rule], tuple[torch.Tensor, torch.Tensor]]]
_MEANING = {
    "dense": dense,
    "key_padding": key_padding,
    "mask": mask,
    "packed": packed,
    "spans": spans,
    "paged": paged,
    "block_map": block_map,
    "video_tiles": video_tiles,
}


@overload
def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    structure: Structure | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | Window | None = None,
    softcap: float = 0.0,
    gate: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor: ...
@overload
def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    structure: Structure | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | Window | None = None,
    softcap: float = 0.0,
    gate: torch.Tensor | None = None,
    return_lse: Literal[True],
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    structure: Structure | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | Window | None = None,
    softcap: float = 0.0,
    gate: torch.Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The exact answer of `attention` with the same arguments, computed and returned in `dtype`; differentiable.

    Shapes are `attention`'s: [B,S,H,D], packed [T,H,D] or [1,T,H,D], paged pools [pages,page_size,Hk,D]. The LSE,
    also in `dtype`, is [B,H,Sq], [H,T] or [1,H,T]. Every visibility matrix is materialised: meant for tests, not for
    speed. ValueError where shapes do not fit; `UnsupportedRequest` for what a structure does not combine with.

    >>> import torch, polyattn as pa
    >>> q, v = torch.zeros(1, 2, 1, 4), torch.tensor([2.0, 6.0]).reshape(1, 2, 1, 1)
    >>> pa.reference_attention(q, q, v, causal=True).flatten().tolist()
    [2.0, 4.0]
    """
    structure = Dense() if structure is None else structure
    if structure.kind not in _MEANING:
        raise UnsupportedRequest(f"reference_attention has no meaning for {type(structure).__name__} yet")
    structure.check(*_checked_shapes(q, k, v, structure))
    sides = window_of(window, causal)
    check_combination(structure, causal, sides, softcap, return_lse, gate)
    if gate is not None:
        check_gate(gate, (*q.shape[:-1], v.shape[-1]))
    rule = Rule(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        causal=causal,
        window=sides,
        gate=None if gate is None else gate.to(dtype),
    )
    out, lse = _MEANING[structure.kind](q.to(dtype), k.to(dtype), v.to(dtype), structure, rule)
    return (out, lse) if return_lse else out


def _checked_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Structure
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of q and k as structures check them: packed rows without a leading axis of 1."""
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    told = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    ranks = {"packed": (3, 4), "paged": (3, 4)}.get(structure.kind, (4,))
    if q.dim() not in ranks or k.dim() != (4 if structure.kind == "paged" else q.dim()) or v.dim() != k.dim():
        raise ValueError(f"q, k, v: [B,S,H,D], packed [T,H,D], or pools [pages,page_size,Hk,D] are needed, {told}")
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k, v: k and v need the same rows and heads, q and k the same head_dim, {told}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q, k, v: query heads must be a multiple of KV heads, {told}")
    if structure.kind == "packed" and q.dim() == 4:
        if q.shape[0] != 1 or k.shape[0] != 1:
            raise ValueError(f"q, k, v: packed rows are [T,H,D] or [1,T,H,D], {told}")
        return shapes[0][1:], shapes[1][1:]
    if structure.kind not in ("packed", "paged") and q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k, v: one batch is needed, {told}")
    return shapes[0], shapes[1]
