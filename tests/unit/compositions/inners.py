"""Strict inner slots: each does one structure by the reference, and refuses what its features do not claim."""

from __future__ import annotations

import torch

from polyattn import structures
from polyattn.door.request import TensorFacts
from polyattn.reference import reference_attention
from polyattn.structures.mask import MaskMeta
from polyattn.structures.packed_meta import PackedMeta

CALL = {"scale": 0.4, "softcap": 1.3, "options": ("an option",)}


class Inner:
    """A slot of one kind that records its calls. `plain=True`: neither causal nor window."""

    def __init__(self, kind: str, *, plain: bool = False, gqa: bool = True, head_dims=None):
        self.kind, self.plain, self.gqa, self.head_dims = kind, plain, gqa, head_dims
        self.calls: list[dict] = []

    def __call__(self, q, k, v, out, *, meta, causal, scale, window, softcap, need_lse, options):
        assert out is None, "compositions write `out` themselves"
        assert options == CALL["options"]
        assert softcap == CALL["softcap"]
        assert scale == CALL["scale"]
        assert q.numel()
        assert k.numel(), "empty calls never reach a slot"
        if self.plain:
            assert not causal
            assert window is None
        assert window is None or all(side is None or side >= 0 for side in window)
        assert not (causal and window is not None and window[1] != 0)
        assert self.gqa or q.shape[-2] == k.shape[-2]
        assert self.head_dims is None or {q.shape[-1], v.shape[-1]} <= self.head_dims
        self.calls.append({"q": q, "k": k, "v": v, "meta": meta, "causal": causal, "window": window})
        answer, lse = reference_attention(
            q, k, v, structure=getattr(self, f"_{self.kind}")(meta, q, k), causal=causal, window=window, scale=scale,
            softcap=softcap, return_lse=True,
        )  # fmt: skip
        return answer, lse.float() if need_lse else None

    def _dense(self, meta, q, k):
        assert meta is None
        assert q.dim() == k.dim() == 4
        return structures.Dense()

    def _packed(self, meta, q, k):
        assert isinstance(meta, PackedMeta)
        assert q.dim() == k.dim() == 3
        for cu, longest, lengths in ((meta.cu_q, meta.max_q, meta.lengths_q), (meta.cu_k, meta.max_k, meta.lengths_k)):
            assert cu.dtype == torch.int32
            assert cu.diff().tolist() == list(lengths)
            assert longest == max(lengths)
        return structures.Packed.from_lengths(meta.lengths_q, meta.lengths_k, spans=meta.spans)

    def _mask(self, meta, q, k):
        assert isinstance(meta, MaskMeta)
        assert q.isfinite().all(), "a masking kernel spreads what padded query rows hold"
        return structures.Mask(meta.tensor.expand(-1, -1, q.shape[1], -1))


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))
