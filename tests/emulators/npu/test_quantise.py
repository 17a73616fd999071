"""The quantisers of A5: what a scale means, groups and tiles at the edges, float4's numbers, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.emulators.npu import dtypes
from tests.emulators.npu.quantise import from_groups, from_tiles, npu_dynamic_block_quant, npu_dynamic_mx_quant
from tests.emulators.npu.stack import using

pytestmark = pytest.mark.emulated

E4M3 = dtypes.numbered(torch.float8_e4m3fn)
X = torch.randn(2, 130, 200, generator=torch.Generator().manual_seed(0))


def test_a_tile_s_scale_is_its_largest_number_over_448() -> None:
    with using(soc="A5"):
        codes, scale = npu_dynamic_block_quant(X, dst_type=E4M3, row_block_size=128)
    assert (codes.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (2, 2, 2))
    assert scale[1, 0, 1].item() == pytest.approx(X[1, :128, 128:].abs().max().item() / 448)
    back = from_tiles(codes, scale, (128, 128))
    assert ((back - X).abs() <= X.abs() / 16 + scale.max() * 2**-9).all()


def test_a_group_shares_a_power_of_two_by_its_largest_number() -> None:
    with using(soc="A5"):
        codes, exponents = npu_dynamic_mx_quant(X, axis=1, dst_type=E4M3)
        assert tuple(exponents.shape) == (2, 3, 200, 2)  # five groups of 130 rows, in pairs
        largest = X[0, 32:64, 7].abs().max()
        assert exponents[0, 0, 7, 1].item() == 127 + int(largest.log2().floor()) - 8
        back = from_groups(codes, exponents, 1)
    assert ((back - X).abs() <= X.abs() / 8 + 2**-6).all()


def test_float4_has_sixteen_numbers_two_a_byte_and_rounds_halves_to_even() -> None:
    row = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.2, -7.0]])
    with using(soc="A5"):
        codes, exponents = npu_dynamic_mx_quant(row)
        assert (codes.dtype, tuple(codes.shape), exponents[0, 0, 0].item()) == (torch.uint8, (1, 5), 127)
        want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -6.0]
        assert from_groups(codes, exponents, -1).tolist() == [want]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("axis", {"axis": 3}),
        ("block_size", {"block_size": 48}),
        ("scale_alg", {"scale_alg": 3}),
        ("dst_type", {"dst_type": 297}),
    ],
)
def test_refusals(words: str, given: dict) -> None:
    with using(soc="A5"), pytest.raises(RuntimeError, match=words):
        npu_dynamic_mx_quant(X, **given)


def test_refusals_of_shapes_and_chips() -> None:
    with using(soc="A5"):
        with pytest.raises(RuntimeError, match="divisible by 2"):
            npu_dynamic_mx_quant(X[..., :3])
        with pytest.raises(RuntimeError, match="2 or 3 dimensions"):
            npu_dynamic_block_quant(X[None], dst_type=E4M3)
    with pytest.raises(RuntimeError, match="not supported on A2"):
        npu_dynamic_mx_quant(X)
    with pytest.raises(RuntimeError, match="not supported on A2"):
        npu_dynamic_block_quant(X, dst_type=E4M3)
    assert npu_dynamic_block_quant(X, dst_type=1)[0].dtype == torch.int8
