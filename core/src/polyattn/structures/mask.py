"""Mask: a boolean or additive mask, with one meaning per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Meta, Structure
from polyattn.structures.host_data import dtype_name, host_tensor, on_host
from polyattn.structures.lasting import lasting, normal
from polyattn.structures.transfer import send

_ADDITIVE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Mask(Structure):
    """Rank 1 [Sk], rank 2 [B,Sk], rank 3 [B,Sq,Sk], rank 4 [B,H,Sq,Sk]; size 1 broadcasts on every axis but Sk.

    bool or integer: nonzero = may attend. Float: additive; an entry at or below its dtype's finite minimum hides the
    key. `Mask.pairs` takes [Sq,Sk], `Mask.keys` takes [Sk] or [B,Sk].

    A mask on the host is copied and searched for NaN and +inf; one on a device, or one that wants a gradient, is
    referenced (leave it unchanged), and only `check=True` searches it.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 3, 2, 8)
    >>> lower = pa.Mask.pairs(torch.ones(3, 3).tril().bool())
    >>> torch.allclose(pa.attention(q, q, q, structure=lower), pa.attention(q, q, q, causal=True), atol=1e-6)
    True
    """

    kind: ClassVar[str] = "mask"
    tensor: torch.Tensor
    given_rank: int

    @lasting
    def __init__(self, tensor: Any, *, check: bool = False) -> None:
        given = host_tensor("mask", tensor)
        rank = given.dim()
        if not 1 <= rank <= 4:
            raise ValueError(f"mask: rank 1 to 4 is needed, got shape {list(given.shape)}")
        if given.dtype.is_complex or (given.dtype.is_floating_point and given.dtype not in _ADDITIVE):
            raise TypeError(f"mask: bool, integer, float16, bfloat16, float32 or float64 is needed, got {given.dtype}")
        known = on_host(given)
        if (known or check) and given.dtype.is_floating_point and not _is_below_inf(given):
            raise ValueError("mask: an additive mask cannot hold NaN or +inf (use -inf to hide a key)")
        if not given.dtype.is_floating_point and given.dtype != torch.bool:
            given = given != 0
        elif known and not given.requires_grad:
            given = _copy(given)
        self._settle(_as_rank_4(normal(given)), rank)

    def _settle(self, tensor: torch.Tensor, given_rank: int) -> None:
        facts = StructureFacts(
            host=on_host(tensor),
            mask_shape=tuple(tensor.shape),
            mask_dtype=dtype_name(tensor.dtype),
            mask_grad=tensor.requires_grad,
            full=tensor.dtype == torch.bool and on_host(tensor) and bool(tensor.all()),
        )
        self._freeze(tensor=tensor, given_rank=given_rank, facts=facts)

    @classmethod
    def keys(cls, tensor: Any, *, check: bool = False) -> Mask:
        """A mask over keys alone: [Sk] or [B,Sk]."""
        given = host_tensor("mask", tensor)
        if given.dim() not in (1, 2):
            raise ValueError(f"mask: Mask.keys takes [Sk] or [B, Sk], got shape {list(given.shape)}")
        return cls(given, check=check)

    @classmethod
    def pairs(cls, tensor: Any, *, check: bool = False) -> Mask:
        """A mask over (query, key) pairs that all rows and heads share: [Sq,Sk]."""
        given = host_tensor("mask", tensor)
        if given.dim() != 2:
            raise ValueError(f"mask: Mask.pairs takes [Sq, Sk], got shape {list(given.shape)}")
        return cls(given.unsqueeze(0).unsqueeze(0), check=check)

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

    def bind(
        self, device: torch.device, q_shape: tuple[int, ...], k_shape: tuple[int, ...], capturing: bool = False
    ) -> Any:
        if self.facts.mask_grad:  # a cached derivation would hold on to one backward's graph
            self.check(q_shape, k_shape)
            return self.prepare(device, k_shape)
        return super().bind(device, q_shape, k_shape, capturing)

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> MaskMeta:
        if device.type != "meta" and self.tensor.device not in (device, torch.device("cpu")):
            raise ValueError(f"mask: it is on {self.tensor.device}, but q is on {device}")
        visible = visible_keys_of(self.tensor)  # where the mask is: on the host it can tell that nothing is hidden
        return _meta_of(send(self.tensor, device), None if visible is None else send(visible, device))

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)

    def anchor_detail(self) -> str:
        # Dynamo may have made the rank a symbol, of which it can make no word
        return next(str(rank) for rank in (1, 2, 3, 4) if self.given_rank == rank)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Mask:
        mask = cls.__new__(cls)
        mask._settle(tensors[0], int(detail))
        return mask

    def __deepcopy__(self, memo: dict[int, Any]) -> Mask:
        if not self.facts.mask_grad:
            return self
        raise TypeError("a Mask that wants a gradient belongs to one graph: build another from the copied parameter")

    def __repr__(self) -> str:
        return f"Mask({list(self.tensor.shape)}, {self.facts.mask_dtype})"


@dataclass(frozen=True, eq=False)
class MaskMeta(Meta):
    """A mask on one device, rank 4 with broadcast axes of size 1.

    keep          bool, True = may attend, or None for an additive mask
    bias          additive, -inf where hidden, or None for a boolean mask
    visible_keys  bool [B|1,Sk]: keys that some query of some head may see; None: all of them
    """

    keep: torch.Tensor | None
    bias: torch.Tensor | None
    visible_keys: torch.Tensor | None

    @property
    def tensor(self) -> torch.Tensor:
        """Whichever of `keep` and `bias` there is."""
        mask = self.keep if self.keep is not None else self.bias
        assert mask is not None
        return mask


def mask_meta(mask: torch.Tensor) -> MaskMeta:
    """Derive `MaskMeta` from a rank 4 mask, where it is."""
    return _meta_of(mask, visible_keys_of(mask))


def _meta_of(mask: torch.Tensor, visible: torch.Tensor | None) -> MaskMeta:
    if not mask.dtype.is_floating_point:
        return MaskMeta(mask, None, visible)
    hidden = mask <= torch.finfo(mask.dtype).min
    return MaskMeta(None, mask.masked_fill(hidden, float("-inf")), visible)


def visible_keys_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Bool [B|1,Sk]: keys that some query may see; None where the host can tell that it is all of them."""
    keep = mask.detach() > torch.finfo(mask.dtype).min if mask.dtype.is_floating_point else mask
    visible = keep.flatten(1, 2).any(dim=1)
    return None if on_host(visible) and bool(visible.all()) else visible


def _is_below_inf(mask: torch.Tensor) -> bool:
    return mask.numel() == 0 or bool(mask.detach().max() < torch.inf)  # the maximum is NaN where an entry is


def _copy(mask: torch.Tensor) -> torch.Tensor:
    """A copy in memory of our own that keeps broadcast (stride 0) axes broadcast."""
    once = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return once.clone().expand(mask.shape)


def _as_rank_4(mask: torch.Tensor) -> torch.Tensor:
    """[Sk], [B,Sk], [B,Sq,Sk] or [B,H,Sq,Sk] with the missing axes of size 1."""
    if mask.dim() == 1:
        mask = mask.unsqueeze(0)
    while mask.dim() < 4:
        mask = mask.unsqueeze(1)
    return mask
