"""The README says what the code does: its capability matrix, its first example, its explanation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import polyattn as pa
from polyattn.cli.capabilities import markdown, matrix
from polyattn.discovery import backends_of, installed_platform

README = Path(__file__).parents[2] / "README.md"


def test_the_capability_matrix_is_the_one_that_the_slots_state() -> None:
    text = README.read_text(encoding="utf-8")
    (written,) = re.findall(r"<!-- capabilities -->\n(.*?)\n<!-- /capabilities -->", text, re.DOTALL)
    platform = installed_platform("cpu")
    assert platform is not None
    assert written.strip() == markdown([matrix("cpu", backends_of(platform))]).strip()


def test_the_first_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "padded rows are zero: True" in shown
    assert "route    cpu:sdpa" in shown


def test_the_explanation_shown_is_the_one_given() -> None:
    q = torch.randn(2, 128, 8, 64)
    text = str(pa.explain(q, q, q, structure=pa.KeyPadding.from_lengths([128, 40], 128), softcap=30.0))
    shown = README.read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("machine"):
            assert line in shown
