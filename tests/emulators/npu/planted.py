"""Backends that each break the vendor's contract in one way, as an author might; "npu.flipped_mask" and so on.

They take a mask, documents or plain attention, and call the ops as the name says.
"""

from __future__ import annotations

from typing import Any

import torch

from polyattn.vendor import Backend, Features, Slot, positive_scale

CAUSAL = "causal"


def _causal_mask(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=like.device).triu(1)


def _above_zero(q: torch.Tensor, asked: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """A scale that is not above 0 moved into q, which is no breach."""
    if asked.get("scale", 1.0) > 0.0:
        return q, asked
    q, scale = positive_scale(q, asked["scale"])
    return q, asked | {"scale": scale}


def _fusion(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "BSND", **asked: Any) -> Any:
    import torch_npu

    q, asked = _above_zero(q, asked)
    heads = q.shape[1 if layout == "TND" else 2]
    return torch_npu.npu_fusion_attention(q, k, v, heads, layout, **asked)[0], None


def _fia(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "BSND", **asked: Any) -> Any:
    import torch_npu

    q, asked = _above_zero(q, asked)
    axis = 1 if layout == "TND" else 2
    named = {"num_heads": q.shape[axis], "num_key_value_heads": k.shape[axis], "input_layout": layout}
    tensors = (t.contiguous() for t in (q, k, v))
    return torch_npu.npu_fused_infer_attention_score(*tensors, **named, **asked)[0], None


def honest(q: Any, k: Any, v: Any, out: Any, *, meta: Any, causal: bool, scale: float, **_: Any) -> Any:
    """The contract kept."""
    rule: dict[str, Any] = {}
    if causal:
        rule = {"atten_mask": _causal_mask(q), "sparse_mode": 3, "inner_precise": 2}
    return _fusion(q, k, v, scale=scale, **rule)


def _keep(meta: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return meta.tensor.bool().expand(q.shape[0], 1, q.shape[1], k.shape[1])


def honest_mask(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Its True keeps, the op's hides."""
    return _fusion(q, k, v, scale=scale, atten_mask=~_keep(meta, q, k), sparse_mode=1, inner_precise=2)


def flipped_mask(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """The mask as it came."""
    return _fusion(q, k, v, scale=scale, atten_mask=_keep(meta, q, k).contiguous(), sparse_mode=1, inner_precise=2)


def mask_of_keys(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """[B,1,1,S]."""
    keep = _keep(meta, q, k)[:, :, :1]
    return _fusion(q, k, v, scale=scale, atten_mask=~keep, sparse_mode=1, inner_precise=2)


def float_mask(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Additive, where the op wants booleans."""
    additive = torch.zeros_like(_keep(meta, q, k), dtype=q.dtype).masked_fill(~_keep(meta, q, k), -10000.0)
    return _fusion(q, k, v, scale=scale, atten_mask=additive, sparse_mode=1)


def empty_rows_kept(q: Any, k: Any, v: Any, out: Any, *, meta: Any, causal: bool, scale: float, **_: Any) -> Any:
    """A mask whose rows may see nothing, without inner_precise=2."""
    return _fusion(q, k, v, scale=scale, atten_mask=~_keep(meta, q, k), sparse_mode=1)


def no_scale(q: Any, k: Any, v: Any, out: Any, **_: Any) -> Any:
    """The op's default is 1."""
    return _fusion(q, k, v)


def fia_no_scale(q: Any, k: Any, v: Any, out: Any, **_: Any) -> Any:
    """The op's default is 1 here too."""
    return _fia(q, k, v)


def fia_no_heads(q: Any, k: Any, v: Any, out: Any, *, scale: float, **_: Any) -> Any:
    """num_heads is 1 by default."""
    import torch_npu

    return torch_npu.npu_fused_infer_attention_score(q, k, v, scale=scale, input_layout="BSND")[0], None


def causal_without_mask(q: Any, k: Any, v: Any, out: Any, *, causal: bool, scale: float, **_: Any) -> Any:
    """sparse_mode=3 alone is full attention."""
    return _fusion(q, k, v, scale=scale, sparse_mode=3 if causal else 0)


def causal_with_its_own_mask(q: Any, k: Any, v: Any, out: Any, *, causal: bool, scale: float, **_: Any) -> Any:
    """The compressed mask at the size of the matrix."""
    small = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    return _fusion(q, k, v, scale=scale, **({"atten_mask": small, "sparse_mode": 3} if causal else {}))


def causal_with_a_wrong_mask(q: Any, k: Any, v: Any, out: Any, *, causal: bool, scale: float, **_: Any) -> Any:
    """2048x2048, but with the diagonal hidden."""
    wrong = torch.ones(2048, 2048, dtype=torch.bool, device=q.device).triu(0)
    return _fusion(q, k, v, scale=scale, **({"atten_mask": wrong, "sparse_mode": 3} if causal else {}))


def top_left(q: Any, k: Any, v: Any, out: Any, *, causal: bool, scale: float, **_: Any) -> Any:
    """sparse_mode=2 is aligned to the first row."""
    return _fusion(q, k, v, scale=scale, **({"atten_mask": _causal_mask(q), "sparse_mode": 2} if causal else {}))


def _ends(meta: Any) -> tuple[list[int], list[int]]:
    return [int(n) for n in meta.cu_q.tolist()][1:], [int(n) for n in meta.cu_k.tolist()][1:]


def _documents(q: Any, k: Any, v: Any, scale: float, ends: Any) -> Any:
    return _fusion(q, k, v, "TND", scale=scale, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1])


def honest_documents(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Ends without the leading zero, as host integers."""
    return _documents(q, k, v, scale, _ends(meta))


def device_boundaries(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Tensors on the device in the place of host integers."""
    return _documents(q, k, v, scale, (meta.cu_q[1:], meta.cu_k[1:]))


def without_the_last_total(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Starts in the place of ends: the last document is left out."""
    q_ends, k_ends = _ends(meta)
    return _documents(q, k, v, scale, (q_ends[:-1] or [0], k_ends[:-1] or [0]))


def lengths_for_ends(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Each document's own length, where the op wants where it ends."""
    lengths = [[b - a for a, b in zip([0, *ends], ends, strict=False)] for ends in _ends(meta)]
    return _documents(q, k, v, scale, lengths)


def fia_leading_zero(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Boundaries with the leading zero, a document of no row, and the last end left out to keep their number."""
    q_ends, k_ends = _ends(meta)
    lengths = {"actual_seq_lengths": [0, *q_ends[:-1]], "actual_seq_lengths_kv": [0, *k_ends[:-1]]}
    return _fia(q, k, v, "TND", scale=scale, **lengths)


def varlen_without_zero(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """MindIE-SD's varlen wants the leading zero, and drops the first number whatever it is."""
    import mindiesd

    q_ends, k_ends = _ends(meta)
    return mindiesd.attention_forward_varlen(q, k, v, q_ends, k_ends, softmax_scale=scale), None


#: Backend -> the kind of structure it takes, and whether it takes causal.
PLANTED = {
    "honest": ("dense", True),
    "honest_mask": ("mask", False),
    "flipped_mask": ("mask", False),
    "mask_of_keys": ("mask", False),
    "float_mask": ("mask", False),
    "empty_rows_kept": ("mask", False),
    "no_scale": ("dense", False),
    "fia_no_scale": ("dense", False),
    "fia_no_heads": ("dense", False),
    "causal_without_mask": ("dense", True),
    "causal_with_its_own_mask": ("dense", True),
    "causal_with_a_wrong_mask": ("dense", True),
    "top_left": ("dense", True),
    "honest_documents": ("packed", False),
    "device_boundaries": ("packed", False),
    "without_the_last_total": ("packed", False),
    "lengths_for_ends": ("packed", False),
    "fia_leading_zero": ("packed", False),
    "varlen_without_zero": ("packed", False),
}


def _backend(name: str) -> Backend:
    kind, causal = PLANTED[name]
    features = Features(
        kinds=frozenset({kind}), causal=causal, dtypes=frozenset({"bfloat16"}), compile=False, head_dims={64}
    )
    return Backend(name, (Slot(f"{__name__}:{name}", features),))


def __getattr__(name: str) -> Any:
    planted = name.removeprefix("backend_")
    if planted not in PLANTED:
        raise AttributeError(f"no planted backend {planted!r}; there are {', '.join(PLANTED)}")
    return lambda: _backend(planted)
