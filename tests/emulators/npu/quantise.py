"""Quantisation in tiles (npu_dynamic_block_quant) and in groups of 32 (npu_dynamic_mx_quant), and the way back."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu import dtypes
from tests.emulators.npu.stack import current, require

#: Rows of a tile may be these.
TILE_ROWS = (1, 128, 256, 512)
#: The numbers of float4_e2m1 by code, without the sign, and where one becomes the next.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_BETWEEN = (_E2M1[1:] + _E2M1[:-1]) / 2
#: The largest exponent of a format, by which the shared one of a group is lowered.
_TOP = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15, None: 2}
#: e8m0 is a power of two with this bias.
_BIAS = 127
GROUP = 32


def npu_dynamic_block_quant(
    x: torch.Tensor, *, min_scale: float = 0.0, round_mode: str = "rint", dst_type: int = 1, row_block_size: int = 1,
    col_block_size: int = 128, dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(codes, float32 scales of the tiles); a scale is what a code is multiplied by to get its number back."""
    kind = dtypes.of(dst_type)
    require(x.dim() in (2, 3), f"Expected x to have 2 or 3 dimensions, but got {x.dim()}.")
    allowed = (torch.float8_e4m3fn, torch.float8_e5m2) if current().soc == "A5" else (torch.int8,)
    require(kind in allowed, f"npu_dynamic_block_quant: {kind} is not supported on {current().soc}")
    require(round_mode == "rint" and row_block_size in TILE_ROWS, f"round_mode {round_mode}, rows {row_block_size}")
    largest = float(torch.finfo(kind).max if kind.is_floating_point else torch.iinfo(kind).max)  # type: ignore[union-attr, arg-type]
    shape = (row_block_size, col_block_size)
    scale = (_tiles(x.double().abs(), shape).amax((-3, -1)) / largest).clamp(min=min_scale).float()
    numbers = x.double() / _spread(scale.double(), x.shape, shape).clamp(min=torch.finfo(torch.float32).tiny)
    return numbers.clamp(-largest, largest).float().to(kind), scale


def from_tiles(codes: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The numbers of codes [...,R,C] in float64; scale has one for each tile of `shape`."""
    return codes.double() * _spread(scale.double(), codes.shape, shape)


def tiles_of(size: torch.Size, shape: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of [...,R,C]."""
    return (*size[:-2], -(-size[-2] // shape[0]), -(-size[-1] // shape[1]))


def _tiles(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[..., tiles, rows, tiles, columns], short tiles filled with zeros."""
    rows, columns = tiles_of(x.shape, shape)[-2:]
    padding = (0, columns * shape[1] - x.shape[-1], 0, rows * shape[0] - x.shape[-2])
    return torch.nn.functional.pad(x, padding).unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))


def _spread(scale: torch.Tensor, size: torch.Size, shape: tuple[int, int]) -> torch.Tensor:
    wide = scale.repeat_interleave(shape[0], -2).repeat_interleave(shape[1], -1)
    return wide[..., : size[-2], : size[-1]]


def npu_dynamic_mx_quant(
    input: torch.Tensor, *, axis: int = -1, round_mode: str = "rint", dst_type: int = dtypes.E2M1,
    block_size: int = GROUP, scale_alg: int | None = 0, dst_type_max: float = 0.0, max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(codes, exponents as bytes [..., pairs of groups, ..., 2]); float4 packs two neighbours of the last axis."""
    kind = dtypes.of(dst_type)
    require(current().soc == "A5", f"npu_dynamic_mx_quant is not supported on {current().soc}")
    require(-input.dim() <= axis < input.dim(), f"Parameter axis is out of input dimension range: {axis}")
    require(block_size % 32 == 0 and 0 < block_size <= 1024, f"block_size {block_size}: a multiple of 32, <= 1024")
    require(scale_alg in (None, 0, 1, 2), f"Invalid scale_alg value: {scale_alg}")
    require(kind in _TOP and (kind is not None or dst_type == dtypes.E2M1), f"dst_type {dst_type} is not supported")
    require(kind is not None or input.shape[-1] % 2 == 0, "float4: the last dim of input must be divisible by 2")
    if scale_alg or round_mode != "rint" or dst_type_max or max_low_bound:
        raise NotImplementedError("(emulator) npu_dynamic_mx_quant: scale_alg 0 and round_mode rint alone")
    x = input.double().movedim(axis, -1)
    groups = -(-x.shape[-1] // block_size)
    parts = torch.nn.functional.pad(x, (0, groups * block_size - x.shape[-1])).unflatten(-1, (groups, block_size))
    most = parts.abs().amax(-1)
    exponent = most.clamp(min=2.0**-200).log2().floor() - _TOP[kind]
    exponent = exponent.clamp(-_BIAS, _BIAS)
    numbers = (parts / exponent.exp2()[..., None]).flatten(-2)[..., : x.shape[-1]].movedim(-1, axis)
    even = torch.nn.functional.pad((exponent + _BIAS).to(torch.uint8), (0, groups % 2)).unflatten(-1, (-1, 2))
    place = axis % input.dim()
    if kind is None:
        return _pack(numbers), even.movedim(-2, place)
    largest = torch.finfo(kind).max
    return numbers.clamp(-largest, largest).float().to(kind), even.movedim(-2, place)


def from_groups(codes: torch.Tensor, exponents: torch.Tensor, axis: int, block_size: int = GROUP) -> torch.Tensor:
    """The numbers of codes in float64; bytes are two float4 each."""
    numbers = _unpack(codes) if codes.dtype == torch.uint8 else codes.double()
    place = axis % numbers.dim()
    scale = (exponents.movedim(place, -2).flatten(-2).double() - _BIAS).exp2()
    rows = numbers.movedim(place, -1)
    return (rows * scale.repeat_interleave(block_size, -1)[..., : rows.shape[-1]]).movedim(-1, place)


def exponents_of(size: Any, axis: int, block_size: int = GROUP) -> tuple[int, ...]:
    """The shape of the exponents of a tensor of `size`."""
    shape = list(size)
    shape[axis] = (shape[axis] + 2 * block_size - 1) // (2 * block_size)
    return (*shape, 2)


def _pack(numbers: torch.Tensor) -> torch.Tensor:
    """To the nearest of the 16 numbers, halves to the even code; the first of two neighbours in the low bits."""
    size = numbers.abs().clamp(max=float(_E2M1[-1]))
    low, high = torch.bucketize(size, _BETWEEN), torch.bucketize(size, _BETWEEN, right=True)
    code = torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(numbers)
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)


def _unpack(codes: torch.Tensor) -> torch.Tensor:
    both = torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()
    return _E2M1[both % 8] * (1 - 2 * (both // 8))
