"""npu_fusion_attention and its gradient, on plain tensors: what the op answers, and what it leaves unwritten."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
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
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]
#: Numbers that dropout's generator starts from, one a call that drops.
_OFFSETS = count()


def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> Seven:  # fmt: skip
    """(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels), as the op's schema orders them."""
    asked = DEFAULTS | dict(zip(DEFAULTS, rest, strict=False)) | named
    return forward(query, key, value, asked | {"head_num": head_num, "input_layout": input_layout})


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: dict[str, Any]) -> Seven:
    """The same from all arguments by name; pse_type says whether the bias is added before the scale (1) or after."""
    known = check(query, key, value, asked)
    drops = asked["keep_prob"] != 1
    if drops and asked["dropout_mask"] is not None:
        raise NotImplementedError("(emulator) the format of dropout_mask is not known")
    seed, offset = (torch.initial_seed() % 2**31, next(_OFFSETS)) if drops else (0, 0)
    asked = asked | {"seed": seed, "offset": offset}
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
    numels = known.batch * known.heads * known.queries * known.keys if drops else 0
    return out, maximum, total, torch.empty(0, dtype=query.dtype), seed, offset, numels


def npu_fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, softmax_max: torch.Tensor | None = None, softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None, attention_in: torch.Tensor | None = None, scale_value: float = 1.0,
    numels: int = 0, **named: Any,
) -> Five:  # fmt: skip
    """(dq, dk, dv, dpse, dsink). The forward's statistics and output are demanded, as the op needs them."""
    asked = DEFAULTS | named | {"scale": scale_value, "head_num": head_num, "input_layout": input_layout}
    known = check(query, key, value, asked)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise RuntimeError(f"call {known.op}Grad failed, error code is 161001: softmax_max, softmax_sum, attention_in")
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    _unwrite_tails(known, grads)
    pse, sink = asked["pse"], asked["sink"]
    dpse = torch.zeros_like(pse, dtype=torch.float64) if pse is not None else None
    dsink = torch.zeros_like(sink, dtype=torch.float64) if sink is not None else None
    dy4, dq, dk, dv = (
        layouts.bnsd(known.layout, t, n)
        for t, n in zip((dy, *grads), (head_num, head_num, *[known.kv_heads] * 2), strict=True)
    )
    for (place, heads, rows), keys, tensors, terms in _matrices(known, asked, query, key, value):
        answer = gradients(dy4[place, heads, rows], *tensors, terms)
        dtype = query.dtype
        dq[place, heads, rows], dk[place, heads, keys] = answer.q.to(dtype), answer.k.to(dtype)
        dv[place, heads, keys] = answer.v.to(dtype)
        if dpse is not None:
            scores = answer.scores * (terms.scale if terms.before is not None else 1.0)
            scores = scores.sum(1, keepdim=True) if dpse.shape[2] == 1 else scores
            dpse[place if dpse.shape[0] == known.batch else 0] += scores
        if dsink is not None and answer.sink is not None:
            dsink += answer.sink
    back = [t.to(kind.dtype) if t is not None else None for t, kind in ((dpse, pse), (dsink, sink))]
    return grads[0], grads[1], grads[2], back[0], back[1]


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
    draws = None
    if asked["keep_prob"] != 1:
        draws = torch.Generator().manual_seed(asked["seed"] * 2**20 + asked["offset"])
    if known.documents is None:
        q_rows = k_rows = [slice(None)] * known.batch
    else:
        q_rows, k_rows = (layouts.slices_of([pair[side] for pair in lengths]) for side in (0, 1))
    for index, (rows, keys) in enumerate(zip(q_rows, k_rows, strict=True)):
        if lengths[index][0]:
            place = 0 if known.documents is not None else index
            tensors = (q[place, :, rows], k[place, :, keys], v[place, :, keys])
            terms = _terms(known, asked, index, lengths)
            if draws is not None:
                shape = (known.heads, *lengths[index])
                terms = terms._replace(
                    kept=(torch.rand(shape, generator=draws) < asked["keep_prob"]) / asked["keep_prob"]
                )
            yield (place, slice(None), rows), keys, tensors, terms


def _terms(known: Shape, asked: dict[str, Any], index: int, lengths: list[tuple[int, int]]) -> Terms:
    pse, mask = asked["pse"], asked["atten_mask"]
    if pse is not None:
        pse = pse[index if pse.shape[0] == known.batch else 0]
    biases = {"before" if asked.get("pse_type", 1) else "after": pse}
    if mask is None:
        return Terms(asked["scale"], sink=asked["sink"], **biases)
    queries, keys = lengths[index]
    packed, mode = known.documents is not None, sparse.mode_of_document(asked["sparse_mode"], index, lengths)
    band = sparse.Band(asked["pre_tockens"], asked["next_tockens"])
    prefix = asked["prefix"][index] if asked["prefix"] is not None else None
    drop = sparse.hidden(mode, queries, keys, band, _own_part(known, mode, mask, index, lengths), prefix)
    zeroed = asked["inner_precise"] == 2 or sparse.zeroes_empty_rows(mode, queries, keys, band, prefix, packed)
    return Terms(asked["scale"], drop, sink=asked["sink"], zeroed=zeroed, **biases)


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
