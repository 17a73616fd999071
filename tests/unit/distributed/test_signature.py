"""What ranks tell each other of a structure: its content where the host has it, with torch alone installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import polyattn as pa
from polyattn.distributed.signature import digest_of
from polyattn.structures import Structure


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.KeyPadding.from_lengths([3, 2], 4), pa.KeyPadding.from_lengths([3, 1], 4)),
        (pa.KeyPadding.from_lengths([3], 4, queries="all"), pa.KeyPadding.from_lengths([3], 4, queries="same")),
        (pa.Mask(torch.ones(1, 1, 2, 2)), pa.Mask(torch.ones(1, 1, 2, 2).double())),
        (pa.Mask(torch.ones(1, 1, 2, 2)), pa.Mask(torch.ones(1, 1, 2, 2).tril())),
        (pa.Packed.from_lengths([1, 3]), pa.Packed.from_lengths([3, 1])),
        (pa.Packed.real_and_pad(3, 5), pa.Packed.real_and_pad(3, 6)),
        (pa.Spans([[(0, 2)]]), pa.Spans([[(0, 3)]])),
        (pa.Mask(torch.ones(1, 1, 0, 3)), None),
    ],
)
def test_other_content_is_another_digest(one: Structure, other: Structure | None) -> None:
    assert digest_of(one) != digest_of(other)


def test_the_same_content_is_the_same_digest_whatever_its_strides() -> None:
    mask = torch.rand(1, 1, 3, 5) < 0.5
    strided = mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert digest_of(pa.Mask(mask)) == digest_of(pa.Mask(strided))


def test_it_needs_no_numpy() -> None:
    code = """
import sys
sys.modules["numpy"] = None
import polyattn as pa
from polyattn.distributed.signature import digest_of
print(digest_of(pa.KeyPadding.from_lengths([3, 2], 4)))
"""
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == digest_of(pa.KeyPadding.from_lengths([3, 2], 4))
