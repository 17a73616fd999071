"""FP8 with a scale per KV head: against the rotation in float64, and against rounding on the grid of e4m3.

The interpreter loses the carry where rounding to e4m3 reaches the next power of two (127 becomes 64), and cuts numbers
below 2**-6 off instead of rounding them: only a GPU is held to what it would be there.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from polyattn.kernels.quantise import Quantised, quantise_fp8, quantise_fp8_packed

#: (heads, KV heads, head dim, value head dim): grouped, no power of two, narrower than a matrix unit, blocks of 128.
SHAPES = [(2, 2, 128, 128), (6, 2, 64, 64), (4, 4, 24, 40), (3, 1, 80, 16), (2, 1, 96, 96), (1, 1, 256, 128)]


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's orthonormal matrix, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def rotation(dim: int) -> torch.Tensor:
    """The orthonormal matrix of a head dimension: Hadamard blocks of its power of two, at most 128."""
    block = min(128, dim & -dim)
    return torch.block_diag(*[hadamard(block)] * (dim // block))


def _random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def _inputs(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], sizes: tuple[int, int, int]):
    heads, kv_heads, dim, v_dim = shape
    batch, queries, keys = sizes
    return (
        _random(device, dtype, batch, queries, heads, dim),
        _random(device, dtype, batch, keys, kv_heads, dim),
        _random(device, dtype, batch, keys, kv_heads, v_dim),
    )


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotate: bool) -> tuple[torch.Tensor, ...]:
    """What the FP8 tensors stand for, in float64 on the host."""
    q, k, v = (tensor.cpu().double() for tensor in (q, k, v))
    turned = rotation(q.shape[3]) if rotate else torch.eye(q.shape[3], dtype=torch.float64)
    return q @ turned, k @ turned, v


def _largest(exact: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Largest values [B, Hk] of [B,S,H,D]."""
    return exact.abs().amax(dim=(1, 3)).unflatten(1, (kv_heads, -1)).amax(dim=2)


def _check(found: Quantised, exact: tuple[torch.Tensor, ...], device: str) -> None:
    kv_heads = exact[1].shape[2]
    for fp8, descale, wanted in zip(found[:3], found[3:], exact, strict=True):
        assert fp8.dtype == torch.float8_e4m3fn
        assert fp8.is_contiguous()
        assert fp8.shape == wanted.shape
        assert descale.dtype == torch.float32
        torch.testing.assert_close(descale.cpu().double(), _largest(wanted, kv_heads) / 448, rtol=1e-5, atol=0)
        steps = descale.cpu().double().repeat_interleave(wanted.shape[2] // kv_heads, 1)[:, None, :, None]
        scaled = wanted / steps
        error = (fp8.cpu().double() - scaled).abs()
        # half a step of a number with 3 bits of mantissa; those below 2**-6 have steps of 2**-9
        smallest = torch.tensor(2.0**-9 if device == "cpu" else 2.0**-10)
        allowed = torch.maximum(scaled.abs() * 2**-4, smallest) * 1.001
        if device == "cpu":
            above = scaled.abs().log2().ceil().exp2()
            carried = scaled.abs() > above * (1 - 2**-5 - 1e-4)
            assert carried.double().mean() < 0.1
            error = error.masked_fill(carried, 0.0)
        assert bool((error <= allowed).all()), float((error - allowed).max())


@pytest.mark.parametrize("rotate", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_scales_and_rotation(
    shape: tuple[int, int, int, int], rotate: bool, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        q, k, v = _inputs(device, dtype, shape, (2, 21, 37))
        _check(quantise_fp8(q, k, v, rotate), _exact(q, k, v, rotate), device)


def test_scores_are_those_of_unrotated_q_and_k(device: str) -> None:
    q, k, v = _inputs(device, torch.float16, (2, 2, 64, 64), (1, 9, 9))
    turned = _exact(q, k, v, rotate=True)
    plain = _exact(q, k, v, rotate=False)
    scores = [torch.einsum("bqhd,bkhd->bhqk", part[0], part[1]) for part in (turned, plain)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-12, atol=1e-12)
    found = quantise_fp8(q, k, v, True)
    _check(found, turned, device)


def test_rotation_is_exact_on_the_grid(device: str) -> None:
    """Inputs whose rotation has values of e4m3 alone, the largest 448: every bit is known."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[(grid == grid.round()) & (grid % 16 == 0)]  # so that float32 holds every sum
    wanted = grid[torch.randint(len(grid), (1, 20, 2, 64), generator=generator)]
    wanted *= torch.randint(0, 2, wanted.shape, generator=generator) * 2 - 1
    wanted[:, 0, :, 0] = 448
    given = (wanted.double() @ hadamard(64) * 8).float()  # 64 * 64**-0.5 * 64**-0.5 = 1 once turned back
    found = quantise_fp8(given.to(device), given.to(device), wanted.to(device), True)
    assert torch.equal(found.q.cpu().float(), wanted)
    assert torch.equal(found.k.cpu().float(), wanted)
    assert torch.equal(found.v.cpu().float(), wanted)
    torch.testing.assert_close(found.q_descale.cpu(), torch.full((1, 2), 8.0))
    torch.testing.assert_close(found.v_descale.cpu(), torch.ones(1, 2))


def test_an_outlier_is_spread_by_the_rotation(device: str) -> None:
    q, k, v = _inputs(device, torch.float32, (1, 1, 128, 128), (1, 16, 16))
    q[:, :, :, 5] *= 50
    plain, turned = (quantise_fp8(q, k, v, rotate).q_descale for rotate in (False, True))
    assert float(turned) < 0.25 * float(plain)


@pytest.mark.parametrize("layout", ["heads first", "fused", "dims apart", "broadcast batch"])
def test_any_strides_give_the_contiguous_result(layout: str, device: str) -> None:
    q, k, v = _inputs(device, torch.float16, (2, 2, 32, 32), (2, 21, 21))
    if layout == "heads first":
        laid_out = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    elif layout == "fused":
        laid_out = list(torch.stack([q, k, v], dim=2).unbind(2))
    elif layout == "dims apart":
        laid_out = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in (q, k, v)]
    else:
        laid_out = [tensor[:1].expand(2, -1, -1, -1) for tensor in (q, k, v)]
    plain = [tensor.contiguous() for tensor in laid_out]
    for found, expected in zip(quantise_fp8(*laid_out, True), quantise_fp8(*plain, True), strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("rotate", [True, False], ids=["rotated", "plain"])
def test_rows_behind_the_end_hold_anything_and_become_0(rotate: bool, device: str) -> None:
    q, k, v = _inputs(device, torch.float16, (4, 2, 32, 16), (3, 40, 37))
    used = {"q": (40, 7, 0), "k": (20, 37, 1)}
    clean = [tensor.clone() for tensor in (q, k, v)]
    for sample in range(3):
        for tensor, zeroed, name in zip((q, k, v), clean, "qkk", strict=True):
            tensor[sample, used[name][sample] :] = (math.nan, math.inf, 6e4)[sample]
            zeroed[sample, used[name][sample] :] = 0
    ends = [torch.tensor(used[name], dtype=torch.int32, device=device) for name in "qk"]
    for found, expected in zip(quantise_fp8(q, k, v, rotate, *ends), quantise_fp8(*clean, rotate), strict=True):
        assert torch.equal(found.float(), expected.float())


def test_heads_of_zeros_stay_zeros(device: str) -> None:
    q, k, v = _inputs(device, torch.float16, (2, 2, 32, 32), (2, 9, 9))
    for tensor in (q, k, v):
        tensor[0, :, 1] = 0
    found = quantise_fp8(q, k, v, True)
    for fp8, descale in zip(found[:3], found[3:], strict=True):
        assert bool((fp8[0, :, 1].float() == 0).all())
        assert bool(descale.isfinite().all())
        assert bool((descale > 0).all())


@pytest.mark.parametrize("longest", [(None, None), (15, 17), (1, 1)], ids=["unknown", "known", "understated"])
def test_each_packed_document_has_its_own_scales_and_rows_past_them_become_0(
    longest: tuple[int | None, int | None], device: str
) -> None:
    q, k, v = (tensor[0] for tensor in _inputs(device, torch.float16, (4, 2, 32, 16), (1, 300, 40)))
    ends_q, ends_k = [0, 10, 10, 25], [0, 3, 20, 33]
    k[3:20] *= 30
    for tensor, end in ((q, 25), (k, 33), (v, 33)):
        tensor[end:] = math.nan
    boundaries = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in (ends_q, ends_k)]
    found = quantise_fp8_packed(q, k, v, True, *boundaries, *longest)
    for index, (tensor, ends) in enumerate(((q, ends_q), (k, ends_k), (v, ends_k))):
        fp8, descale = found[index], found[3 + index]
        assert tuple(descale.shape) == (3, 2)
        assert bool((fp8[ends[-1] :].float() == 0).all())
        for document, (start, end) in enumerate(pairwise(ends)):
            if start < end:
                part = tensor[None, start:end]
                alone = (part, part[:, :, :2], part[:, :, :2]) if index == 0 else (part, part, part)
                expected = quantise_fp8(*alone, index != 2)
                assert torch.equal(fp8[start:end].float(), expected[0][0].float())
                assert torch.equal(descale[document], expected[3][0])


def test_one_packed_document_is_one_sample(device: str) -> None:
    q, k, v = _inputs(device, torch.float16, (4, 2, 24, 40), (1, 30, 41))
    cu_q, cu_k = (torch.tensor([0, rows], dtype=torch.int32, device=device) for rows in (30, 41))
    packed = quantise_fp8_packed(q[0], k[0], v[0], False, cu_q, cu_k)
    for found, expected in zip(packed[:3], quantise_fp8(q, k, v, False)[:3], strict=True):
        assert torch.equal(found.float(), expected[0].float())


def test_boundaries_past_the_rows_are_those_of_the_rows(device: str) -> None:
    q, k, v = (tensor[0] for tensor in _inputs(device, torch.float16, (2, 2, 32, 16), (1, 30, 40)))
    wild = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([-5, 12, 99, 1000], [-1, 7, 99, 41])]
    tame = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 12, 30, 30], [0, 7, 40, 40])]
    found, expected = (quantise_fp8_packed(q, k, v, True, *boundaries) for boundaries in (wild, tame))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def test_the_same_bits_each_time_and_inputs_unchanged(device: str) -> None:
    q, k, v = _inputs(device, torch.float16, (4, 2, 64, 64), (2, 70, 70))
    before = [tensor.clone() for tensor in (q, k, v)]
    first, second = quantise_fp8(q, k, v, True), quantise_fp8(q, k, v, True)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))
