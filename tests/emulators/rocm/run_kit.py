"""The conformance kit over a ROCm backend whose native ops are emulated on the CPU, on a machine that is described.

    EMULATED_PACKAGES=FOLDER python -m tests.emulators.rocm.run_kit rocm:flash_attn --arch gfx950 --structures dense

What passes here is our call into the vendor's ops and what we make of their answers; the vendor's kernels do not run.
The report says under "sdpa" how often each of SDPA's kernels would have run.
"""

from __future__ import annotations

import sys

from tests.emulators.kit import Room
from tests.emulators.rocm.emulated import EMULATORS, emulators_of
from tests.emulators.rocm.stack import AITER, CHIPS, TORCH, Stack


def _variables(backend: str) -> dict[str, str]:
    given = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
    for emulator in emulators_of(backend):
        given |= getattr(emulator, "ENV", {})
    return given


ROOM = Room(
    "rocm", tuple(EMULATORS), ("FLASH_ATTENTION_", "TRITON_", "TORCH_ROCM_", "AITER_"), variables=_variables
)  # fmt: skip
run_kit = ROOM.run_kit


def main() -> int:
    """The command line."""
    parser = ROOM.command_line(__doc__)
    parser.add_argument("--arch", choices=CHIPS, default=Stack.arch)
    parser.add_argument("--aiter", choices=AITER, default=Stack.aiter)
    parser.add_argument("--torch", choices=TORCH, default=Stack.torch)
    return ROOM.main(parser)


if __name__ == "__main__":
    sys.exit(main())
