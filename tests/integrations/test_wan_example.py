"""examples/wan_video.py, tiny: its dense attention is diffusers' own, and its sparse one is as far off as it prints."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "wan_video.py"
#: float32 through two layers.
ROUNDING = 1e-5
#: "4 of 8  17.3  14.81x  6.1e-03  1.7e-01  cpu:sdpa"
ROW = re.compile(r"(\d+) of (\d+) +[\d.]+ +[\d.]+x +(\S+) +(\S+)  (.+)")


def test_dense_is_diffusers_own_and_fewer_tiles_are_further_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--frames", "8", "--size", "16"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    (apart,) = re.findall(r"^512 tokens, 2 layers; .* diffusers' own by (\S+)$", said, re.MULTILINE)
    assert float(apart) <= ROUNDING
    rows = ROW.findall(said)
    assert [(int(kept), int(tiles)) for kept, tiles, *_ in rows] == [(8, 8), (4, 8), (2, 8), (1, 8)]
    for place in (2, 3):  # of the model, of one layer
        errors = [float(row[place]) for row in rows]
        assert errors == sorted(errors)
        assert errors[0] <= ROUNDING < 1e-3 < errors[1] < errors[-1] < 1, errors
