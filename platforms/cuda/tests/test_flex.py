"""flex on these devices: which of them its kernels are compiled for. Its slots are tested in tests/unit/backends."""

from __future__ import annotations

import pytest

from polyattn.vendor import Accepted, Machine, Request, TensorFacts, resolve
from polyattn_cuda import flex


@pytest.mark.parametrize(("arch", "taken"), [("sm_75", False), ("sm_80", True), ("sm_90", True), ("", True)])
def test_architectures(arch: str, taken: bool) -> None:
    tensor = TensorFacts.contiguous((1, 8, 2, 64), "bfloat16")
    machine = Machine("cuda", "cuda", arch=arch, versions={"triton": "3.6.0"})
    answer = resolve(Request(tensor, tensor, tensor, device="cuda:0"), machine, [flex.backend()])[0]
    assert isinstance(answer, Accepted) == taken
    assert taken or f"sm_80 or later, this is {arch}" in " ".join(answer.reasons)
