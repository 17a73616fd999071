"""The gate of one call: rides on the call's VideoTiles into the slots' meta, so that no signature has to name it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.arguments import check_gate
from polyattn.request import autocast_dtype
from polyattn.structures.base import Structure
from polyattn.structures.host_data import dtype_name
from polyattn.structures.video_meta import VideoTilesMeta
from polyattn.structures.video_tiles import VideoTiles


class GatedTiles(VideoTiles):
    """VideoTiles with the gate of one call. All it derives, it shares with the structure that it was made of."""

    gate: torch.Tensor

    def bind(
        self, device: torch.device, q_shape: tuple[int, ...], k_shape: tuple[int, ...], capturing: bool = False
    ) -> VideoTilesMeta:
        meta: VideoTilesMeta = super().bind(device, q_shape, k_shape, capturing)
        return meta.with_gate(self.gate)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.gate,)


def gated(structure: Structure | None, gate: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> GatedTiles:
    """`structure` with the gate of a call on q, k, v; raises as `fitting_gate`."""
    gate = fitting_gate(structure, gate, q, k, v)
    assert isinstance(structure, VideoTiles)
    wants_grad = gate.requires_grad and torch.is_grad_enabled()
    twin = structure.twins.get(wants_grad)
    if twin is None:
        twin = structure.twins[wants_grad] = _twin(structure, wants_grad)
    with_it = object.__new__(GatedTiles)
    vars(with_it).update(twin, gate=gate)
    return with_it


def fitting_gate(
    structure: Structure | None, gate: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The gate as slots get it: its rows past q's are dropped, autocast casts it as it casts q.

    TypeError or ValueError where the structure takes none, or the gate does not fit the output.
    """
    if not isinstance(structure, VideoTiles):
        raise ValueError(f"gate: only VideoTiles takes a gate, the structure is {type(structure).__name__}")
    if not (isinstance(q, torch.Tensor) and isinstance(v, torch.Tensor) and q.dim() == v.dim() == 4):
        raise ValueError("q, k, v: VideoTiles takes [B,S,H,D]")
    check_gate(gate, (*q.shape[:-1], v.shape[-1]))
    if gate.device != q.device:
        raise ValueError(f"gate: it lies on {gate.device}, q on {q.device}")
    dtype = autocast_dtype(q, k, v)
    if dtype is not None:
        gate = gate.to(dtype)
    elif gate.dtype != q.dtype:
        raise TypeError(f"gate: q's dtype {dtype_name(q.dtype)} is needed (or autocast), got {dtype_name(gate.dtype)}")
    fitting: torch.Tensor = gate
    return fitting if fitting.shape[1] == q.shape[1] else fitting.narrow(1, 0, q.shape[1])


def _twin(structure: VideoTiles, wants_grad: bool) -> dict[str, Any]:
    """The fields of a structure like this one that has a gate, all but the gate."""
    video = structure.facts.video
    assert video is not None
    like = object.__new__(GatedTiles)
    kept = {name: value for name, value in vars(structure).items() if name not in ("route_key", "twins")}
    facts = replace(structure.facts, video=replace(video, gate=True, gate_grad=wants_grad))
    vars(like).update(kept, facts=facts)
    _ = like.route_key  # once for all calls
    return vars(like)
