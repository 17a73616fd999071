"""npu_fusion_attention and its gradient, on plain tensors: what the op answers, and what it leaves unwritten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.emulators.npu import layouts, sparse
from tests.emulators.npu.fusion_checks import Shape, check
from tests.emulators.npu.numerics import Terms, attend, gradients

NOTHING = 2147483647
#: Every argument beside q, k, v, with what it is when left out.
DEFAULTS: dict[str, Any] = {
    "pse": None, "padding_mask": None, "atten_mask": None, "scale": 1.0, "keep_prob": 1.0, "pre_tockens": NOTHING,
    "next_tockens": NOTHING, "inner_precise": 0, "prefix": None, "actual_seq_qlen": None, "actual_seq_kvlen": None,
    "sparse_mode": 0, "gen_mask_parallel": True, "sync": False, "softmax_layout": "", "sink": None,
    "dropout_mask": None, "seed": 0, "offset": 0,
}  # fmt: skip

Seven = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> Seven:  # fmt: skip
    """(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels), as the op's schema orders them."""
    asked = DEFAULTS | dict(zip(DEFAULTS, rest, strict=False)) | named
    asked |= {"head_num": head_num, "input_layout": input_layout}
    known = check(query, key, value, asked)
    if asked["keep_prob"] != 1:
        raise NotImplementedError("(emulator) dropout is not emulated")
    out = layouts.unwritten(
        known.layout, known.batch, known.heads, known.queries, known.v_dim, torch.empty(0, dtype=query.dtype)
    )
    rows = layouts.bnsd(known.layout, out, known.heads)
    maximum, total = _statistics(known), _statistics(known)
    for part, _, tensors, terms in _matrices(known, asked, query, key, value):
        answer = attend(*tensors, terms)
        rows[part] = answer.out.to(out.dtype)
        _write_statistics(known, asked, maximum, part, answer.maximum)
        _write_statistics(known, asked, total, part, answer.total)
    return out, maximum, total, torch.empty(0, dtype=query.dtype), 0, 0, 0


def npu_fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, softmax_max: torch.Tensor | None = None, softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None, attention_in: torch.Tensor | None = None, scale_value: float = 1.0,
    numels: int = 0, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv, dpse, dsink). The forward's statistics and output are demanded, as the op needs them."""
    asked = DEFAULTS | named | {"scale": scale_value, "head_num": head_num, "input_layout": input_layout}
    known = check(query, key, value, asked)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise RuntimeError(f"call {known.op}Grad failed, error code is 161001: softmax_max, softmax_sum, attention_in")
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    _unwrite_tails(known, grads)
    dy4, dq, dk, dv = (
        layouts.bnsd(known.layout, t, n)
        for t, n in zip((dy, *grads), (head_num, head_num, *[known.kv_heads] * 2), strict=True)
    )
    for (place, heads, rows), keys, tensors, terms in _matrices(known, asked, query, key, value):
        answer = gradients(dy4[place, heads, rows], *tensors, terms)
        dq[place, heads, rows], dk[place, heads, keys], dv[place, heads, keys] = (t.to(query.dtype) for t in answer)
    return grads[0], grads[1], grads[2], None, torch.empty(0)


#: (batch row, heads, rows) of the output as [B,N,S,Dv].
Part = tuple[int, slice, slice]


def _matrices(
    known: Shape, asked: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[Part, slice, tuple[torch.Tensor, torch.Tensor, torch.Tensor], Terms]]:
    """Each batch row or document: its part of the output, its keys' rows, its q, k and v, and what else enters."""
    q, k, v = (
        layouts.bnsd(known.layout, t, n) for t, n in ((q, known.heads), (k, known.kv_heads), (v, known.kv_heads))
    )
    lengths = known.documents or [(known.queries, known.keys)] * known.batch
    if known.documents is None:
        q_rows = k_rows = [slice(None)] * known.batch
    else:
        q_rows, k_rows = (layouts.slices_of([pair[side] for pair in lengths]) for side in (0, 1))
    for index, (rows, keys) in enumerate(zip(q_rows, k_rows, strict=True)):
        if lengths[index][0]:
            place = 0 if known.documents is not None else index
            tensors = (q[place, :, rows], k[place, :, keys], v[place, :, keys])
            yield (place, slice(None), rows), keys, tensors, _terms(known, asked, index, lengths)


def _terms(known: Shape, asked: dict[str, Any], index: int, lengths: list[tuple[int, int]]) -> Terms:
    pse, mask = asked["pse"], asked["atten_mask"]
    if pse is not None:
        pse = pse[index if pse.shape[0] == known.batch else 0]
    if mask is None:
        return Terms(asked["scale"], before=pse, sink=asked["sink"])
    queries, keys = lengths[index]
    packed, mode = known.documents is not None, sparse.mode_of_document(asked["sparse_mode"], index, lengths)
    band = sparse.Band(asked["pre_tockens"], asked["next_tockens"])
    prefix = asked["prefix"][index] if asked["prefix"] is not None else None
    drop = sparse.hidden(mode, queries, keys, band, _own_part(known, mode, mask, index, lengths), prefix)
    zeroed = asked["inner_precise"] == 2 or sparse.zeroes_empty_rows(mode, queries, keys, band, prefix, packed)
    return Terms(asked["scale"], drop, before=pse, sink=asked["sink"], zeroed=zeroed)


def _own_part(known: Shape, mode: int, mask: torch.Tensor, index: int, lengths: list[tuple[int, int]]) -> torch.Tensor:
    """The part of a full-size mask that is one matrix's; the mask itself in the other modes."""
    if mode not in (0, 1, 5):
        return mask
    if known.documents is None:
        return mask[index if mask.shape[0] == known.batch else 0] if mask.dim() == 4 else mask
    queries, keys = lengths[index]
    if len(lengths) > 1 and tuple(mask.shape) == (sum(q for q, _ in lengths), sum(k for _, k in lengths)):
        rows, cols = (layouts.slices_of([pair[side] for pair in lengths])[index] for side in (0, 1))
        return mask[rows, cols]
    return mask[:queries, :keys]


def _statistics(known: Shape) -> torch.Tensor:
    shape = (known.batch, known.heads, known.queries, 8)
    if known.documents is not None:
        shape = (known.queries, known.heads, 8)  # type: ignore[assignment]
    return torch.full(shape, float("nan"))


def _write_statistics(known: Shape, asked: dict[str, Any], into: torch.Tensor, part: Part, rows: torch.Tensor) -> None:
    """Rows [N,Sq], eight times each. A packed document's memory is in the order N, S unless softmax_layout is TND."""
    wide = rows.float()[..., None].expand(*rows.shape, 8)
    if known.documents is None:
        into[part] = wide
    elif asked["softmax_layout"] == "TND":
        into[part[2]] = wide.transpose(0, 1)
    else:
        into[part[2]] = wide.reshape(rows.shape[1], rows.shape[0], 8)


def _unwrite_tails(known: Shape, grads: list[torch.Tensor]) -> None:
    if known.documents is not None:
        for grad, side in zip(grads, (0, 1, 1), strict=True):
            grad[sum(pair[side] for pair in known.documents) :] = float("nan")
