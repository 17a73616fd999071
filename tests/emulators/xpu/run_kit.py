"""The conformance kit over an XPU backend whose packages are emulated on the CPU, on a device that the caller names.

    EMULATED_PACKAGES=FOLDER python -m tests.emulators.xpu.run_kit xpu:vllm_xpu --device PTL --structures dense,packed

What passes here is our call into the vendor's packages and what we make of their answers; no kernel of theirs runs.
The report says under "ops" how often each emulated kernel ran.
"""

from __future__ import annotations

import argparse
import sys

from tests.emulators.kit import Room
from tests.emulators.xpu.emulated import EMULATORS, STACKS
from tests.emulators.xpu.releases import DEVICES, TORCH
from tests.emulators.xpu.stack import Stack


def _variables(backend: str) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1"} if backend == "triton" else {}


ROOM = Room("xpu", tuple(EMULATORS), ("VLLM_XPU_", "TRITON_"), variables=_variables, stacks=STACKS)
run_kit = ROOM.run_kit


def main() -> int:
    """The command line."""
    parser = ROOM.command_line(__doc__)
    parser.add_argument("--device", choices=DEVICES, default=Stack.device)
    parser.add_argument("--torch", choices=TORCH, default=argparse.SUPPRESS)  # the backend's own, where it has one
    return ROOM.main(parser)


if __name__ == "__main__":
    sys.exit(main())
