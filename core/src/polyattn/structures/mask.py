"""Mask: a boolean or additive mask, with one meaning per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure
from polyattn.structures.host_data import on_host


class Mask(Structure):
    """Rank 1 [Sk], rank 2 [B,Sk], rank 3 [B,Sq,Sk], rank 4 [B,H,Sq,Sk]; size 1 broadcasts on every axis but Sk.

    bool or integer: nonzero = may attend. Float: additive; an entry at or below its dtype's finite minimum hides the
    key. `Mask.pairs` takes [Sq,Sk], `Mask.keys` takes [Sk] or [B,Sk].

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 3, 2, 8)
    >>> lower = pa.Mask.pairs(torch.ones(3, 3).tril().bool())
    >>> torch.allclose(pa.attention(q, q, q, structure=lower), pa.attention(q, q, q, causal=True), atol=1e-6)
    True
    """

    kind: ClassVar[str] = "mask"
    tensor: torch.Tensor
    given_rank: int

    def __init__(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"mask: a tensor is needed, got {type(tensor).__name__}")
        if not 1 <= tensor.dim() <= 4:
            raise ValueError(f"mask: rank 1 to 4 is needed, got shape {list(tensor.shape)}")
        if tensor.dtype.is_complex:
            raise TypeError(f"mask: bool, integer or float is needed, got {tensor.dtype}")
        rank = tensor.dim()
        if rank < 3:
            tensor = tensor.reshape(-1 if rank == 2 else 1, 1, 1, tensor.shape[-1]) if tensor.numel() else _spread(tensor)
        elif rank == 3:
            tensor = tensor[:, None]
        self._settle(tensor, rank)

    def _settle(self, tensor: torch.Tensor, given_rank: int) -> None:
        additive = tensor.dtype.is_floating_point
        if additive and on_host(tensor) and bool((tensor.isnan() | tensor.isposinf()).any()):
            raise ValueError("mask: an additive mask cannot hold NaN or +inf (use -inf to hide a key)")
        if not additive and tensor.dtype != torch.bool:
            tensor = tensor != 0
        name = str(tensor.dtype).removeprefix("torch.")
        facts = StructureFacts(
            host=on_host(tensor), mask_shape=tuple(tensor.shape), mask_dtype=name, mask_grad=tensor.requires_grad
        )
        self._freeze(tensor=tensor, given_rank=given_rank, facts=facts)

    @classmethod
    def keys(cls, tensor: torch.Tensor) -> Mask:
        """A mask over keys alone: [Sk] or [B,Sk]."""
        if isinstance(tensor, torch.Tensor) and tensor.dim() not in (1, 2):
            raise ValueError(f"mask: Mask.keys takes [Sk] or [B, Sk], got shape {list(tensor.shape)}")
        return cls(tensor)

    @classmethod
    def pairs(cls, tensor: torch.Tensor) -> Mask:
        """A mask over (query, key) pairs that all rows and heads share: [Sq,Sk]."""
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 2:
            raise ValueError(f"mask: Mask.pairs takes [Sq, Sk], got shape {list(tensor.shape)}")
        return cls(tensor[None, None])

    @property
    def additive(self) -> bool:
        """Whether entries are added to the scores; otherwise they say who may attend."""
        return self.tensor.dtype.is_floating_point

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        shape = self.tensor.shape
        batch, queries, heads = q_shape[0], q_shape[1], q_shape[2]
        keys = k_shape[1]
        if shape[-1] != keys:
            raise ValueError(f"mask: its last axis is Sk={keys} and never broadcasts, got {shape[-1]}")
        if self.given_rank == 2 and shape[0] not in (1, batch):
            hint = "; an [Sq, Sk] mask is Mask.pairs(t)" if shape[0] == queries else ""
            raise ValueError(f"mask: rank 2 means [B={batch}, Sk={keys}], got {[shape[0], shape[-1]]}{hint}")
        for axis, (name, want) in enumerate((("B", batch), ("H", heads), ("Sq", queries))):
            if shape[axis] not in (1, want):
                raise ValueError(f"mask: axis {name} must be 1 or {want}, got {shape[axis]} in {list(shape)}")

    def bind(self, device: torch.device, q_shape: tuple[int, ...], k_shape: tuple[int, ...], capturing: bool = False) -> MaskMeta:
        if self.facts.mask_grad:  # a cached derivation would hold on to one backward's graph
            self.check(q_shape, k_shape)
            return self.prepare(device, k_shape)
        meta: MaskMeta = super().bind(device, q_shape, k_shape, capturing)
        return meta

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> MaskMeta:
        return mask_meta(self.tensor.to(device), reduce_pairs=self.facts.host)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)

    def anchor_detail(self) -> str:
        return str(self.given_rank)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Mask:
        mask = cls.__new__(cls)
        mask._settle(tensors[0], int(detail))
        return mask

    def __repr__(self) -> str:
        return f"Mask({list(self.tensor.shape)}, {self.facts.mask_dtype})"


@dataclass(frozen=True)
class MaskMeta:
    """A mask on one device, rank 4 with broadcast axes of size 1.

    keep          bool, True = may attend, or None for an additive mask
    bias          additive, -inf where hidden, or None for a boolean mask
    visible_keys  bool [B|1,Sk]: keys that some query may see; None: all of them, or not known (rank 3 and 4 on a device)
    """

    keep: torch.Tensor | None
    bias: torch.Tensor | None
    visible_keys: torch.Tensor | None
    _as: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @property
    def tensor(self) -> torch.Tensor:
        """Whichever of `keep` and `bias` there is."""
        mask = self.keep if self.keep is not None else self.bias
        assert mask is not None
        return mask

    def bias_as(self, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask in `dtype`, converted once for all layers."""
        assert self.bias is not None
        if self.bias.dtype == dtype or self.bias.requires_grad:
            return self.bias.to(dtype)
        if dtype not in self._as:
            self._as[dtype] = self.bias.to(dtype)
        return self._as[dtype]


def mask_meta(mask: torch.Tensor, *, reduce_pairs: bool) -> MaskMeta:
    """Derive `MaskMeta` from a rank 4 mask. `reduce_pairs`: look for keys hidden from all queries in every mask.

    Reading whether any key is hidden at all is left to CPU tensors.
    """
    additive = mask.dtype.is_floating_point
    keep = mask > torch.finfo(mask.dtype).min if additive else mask
    bias = mask.masked_fill(~keep, float("-inf")) if additive else None
    visible = None
    if reduce_pairs or mask.shape[1:3] == (1, 1):
        visible = keep.detach().flatten(1, 2).any(dim=1)
        if visible.device.type == "cpu" and on_host(visible) and bool(visible.all()):
            visible = None
    return MaskMeta(None if additive else keep, bias, visible)


def _spread(empty: torch.Tensor) -> torch.Tensor:
    shape = (1, *empty.shape) if empty.dim() == 1 else tuple(empty.shape)
    return empty.reshape(shape[0], 1, 1, shape[1])
