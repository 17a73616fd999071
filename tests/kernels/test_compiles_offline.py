"""Every kernel of the room compiles to machine code for each architecture, without a GPU, and fits on it.

pytest tests/kernels/test_compiles_offline.py -k gfx942 -s     prints registers, spills and occupancy of each
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

import polyattn.kernels
from tests.kernels.offline import TARGETS, Signature, compiled

INTERPRETED = False  # read by conftest.py: compiling needs Triton as it is


def _signatures() -> Iterator[Signature]:
    for file in sorted(Path(__file__).parent.glob("signatures_*.py")):
        yield from importlib.import_module(f"tests.kernels.{file.stem}").SIGNATURES


SIGNATURES = tuple(_signatures())


@pytest.mark.parametrize(
    ("signature", "architecture"),
    [
        pytest.param(signature, architecture, id=f"{signature.kernel.__name__}-{signature.name}-{architecture}")
        for signature in SIGNATURES
        for architecture in signature.targets
    ],
)
def test_compiles_and_fits(signature: Signature, architecture: str) -> None:
    found = compiled(signature, architecture)
    sys.stdout.write(f"{architecture} {signature.kernel.__name__} {signature.name}: {found}\n")
    assert found.spills <= signature.spills_allowed, found
    assert found.shared <= TARGETS[architecture][1]
    assert found.occupancy > 0, found


@pytest.mark.parametrize("file", [module.name for module in pkgutil.iter_modules(polyattn.kernels.__path__)])
def test_every_kernel_that_is_launched_has_a_signature(file: str) -> None:
    module = vars(importlib.import_module(f"polyattn.kernels.{file}"))
    launched = [value for name, value in module.items() if isinstance(value, JITFunction) and name.endswith("_kernel")]
    compiled_here = [signature.kernel for signature in SIGNATURES]
    assert all(any(kernel is known for known in compiled_here) for kernel in launched), (file, launched)


def test_rows_move_in_vectors_of_16_bytes() -> None:
    """Without this a copy runs at a fraction of the memory's speed, and still gives the right answer."""
    for signature in SIGNATURES:
        if signature.name in ("pack-dense", "unpack-lse"):
            assembly = compiled(signature, "sm_90").assembly
            wide = [line for line in assembly.splitlines() if ".v4.b32" in line]
            assert any("ld.global" in line for line in wide), signature.name
            assert any("st.global" in line for line in wide), signature.name
