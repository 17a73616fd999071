"""Public fault reports, by their rows, on a ROCm device: the cases that all vendors share, and some of its packages."""

from __future__ import annotations

import math

import pytest
import torch

import polyattn as pa
from platforms.rocm.tests.on_device.here import MARK, ON
from platforms.tests.on_device.device import Name, assert_near, assert_rows, exact
from platforms.tests.on_device.fault_cases import FaultCases
from tests.unit.fault_values import values

pytestmark = MARK


class TestFaultCases(FaultCases):
    """With what these packages do of their own."""

    on = ON

    def test_10_causal_over_square_documents_and_empty_ones(self, backend: Name) -> None:
        v = ON.here(values(1, 3, 5, 7, 8))
        documents = pa.Packed.from_lengths([0, 2, 0, 3, 0])
        q = torch.zeros_like(v)
        out, lse = ON.attend(backend, q, q, v, structure=documents, causal=True, return_lse=True)
        assert_rows(out, [1, 2, 5, 6, 20 / 3])
        want = [math.log(1), math.log(2), math.log(1), math.log(2), math.log(3)]
        assert lse[0].tolist() == pytest.approx(want, abs=1e-3)

    def test_36_pages_of_the_size_that_the_packages_read(self, backend: Name) -> None:
        cache = pa.PagedKVCache(3, 128, 1, 64, ON.half, torch.device(ON.device))
        keys = ON.drawn(200, 1, 64, seed=1)
        cache.write(keys, keys, torch.cat((torch.arange(256, 384), torch.arange(72))).to(ON.device))
        q, structure = ON.drawn(1, 3, 2, 64), pa.Paged([[2, 0]], [200])
        out = ON.attend(backend, q, cache.k, cache.v, structure=structure, causal=True)
        assert_near(out, exact(q, cache.k, cache.v, structure=structure, causal=True))

    def test_40_a_head_size_outside_the_list_is_refused_with_the_list(self, package: Name) -> None:
        q = ON.here(torch.zeros(1, 4, 2, 512))
        with pytest.raises(ValueError, match=r"head_dim 512 not in \(8 to 256 in steps of 8\)"):
            pa.attention(q, q, q, backend=ON.full(package))
