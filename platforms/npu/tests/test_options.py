"""NpuOptions: what is stated, what is refused, and what asks for laser attention."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
import torch

from polyattn_npu import NpuOptions
from polyattn_npu.options import LASER, asks_for_laser, npu_options


def test_nothing_is_stated_by_default() -> None:
    assert NpuOptions().stated() == ()
    assert NpuOptions.platform == "npu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op_type": "flash"}, ("op_type", "'flash'", "fused_attn_score")),
        ({"op_layout": "SBH"}, ("op_layout", "'SBH'", "BNSD")),
        ({"op_layout": "TND"}, ("op_layout", "'TND'")),
        ({"op_layout": torch.tensor([1, 2])}, ("op_layout", "tensor([1, 2])")),
        ({"op_layout": numpy.array(["BNSD", "BSND"])}, ("op_layout", "array", "BNSD")),
        ({"opt_mode": "auto"}, ("opt_mode", "'auto'", "static")),
        ({"laser_input_scale": 6}, ("laser_input_scale", "6", "power of two")),
        ({"laser_input_scale": 0}, ("laser_input_scale", "power of two")),
        ({"laser_input_scale": True}, ("laser_input_scale", "True")),
        ({"laser_max_abs": True}, ("laser_max_abs", "True")),
        ({"laser_max_abs": 0.0}, ("laser_max_abs", "0.0")),
        ({"laser_max_abs": 10**400}, ("laser_max_abs", "finite")),
        ({"laser_max_abs": float("inf")}, ("laser_max_abs", "inf")),
        ({"laser_max_abs": float("nan")}, ("laser_max_abs", "nan")),
    ],
)
def test_a_wrong_value_is_named(given, words) -> None:
    with pytest.raises(ValueError) as told:
        NpuOptions(**given)
    assert all(word in str(told.value) for word in words)


def test_the_last_statement_of_a_field_counts() -> None:
    given = (NpuOptions(op_layout="BNSD", op_type=LASER), object(), NpuOptions(op_layout="BSND"))
    assert npu_options(given) == NpuOptions(op_layout="BSND", op_type=LASER)
    assert npu_options(()) == NpuOptions()


@pytest.mark.parametrize(
    ("options", "variables", "asked"),
    [
        ((), {}, False),
        ((NpuOptions(op_layout="BNSD"),), {}, False),
        ((NpuOptions(op_type=LASER),), {}, True),
        ((NpuOptions(laser_input_scale=1),), {}, True),
        ((NpuOptions(laser_max_abs=10.0),), {}, True),
        ((), {"MINDIE_SD_FA_TYPE": LASER}, True),
        ((), {"MINDIE_SD_FA_TYPE": "fused_attn_score"}, False),
        ((NpuOptions(op_type="fused_attn_score"),), {"MINDIE_SD_FA_TYPE": LASER}, False),
    ],
)
def test_what_asks_for_laser(options, variables, asked) -> None:
    assert asks_for_laser(options, variables) is asked


def test_the_package_with_its_options_imports_no_torch() -> None:
    code = "import sys, polyattn_npu; polyattn_npu.NpuOptions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
