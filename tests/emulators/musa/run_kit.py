"""The conformance kit over a MUSA backend whose packages are emulated on the CPU, on a card that the caller names.

    python -m tests.emulators.musa.run_kit musa:mate --card S5000 --structures dense,packed

What passes here is our call into the vendor's packages and what we make of their answers; no kernel of theirs runs.
The report says under "ops" how often each emulated kernel ran.
"""

from __future__ import annotations

import sys

from tests.emulators.kit import Room
from tests.emulators.musa.emulated import EMULATORS
from tests.emulators.musa.stack import CARDS, SDKS, Stack

ROOM = Room("musa", tuple(EMULATORS), ("MUSA_", "MATE_"))
run_kit = ROOM.run_kit


def main() -> int:
    """The command line."""
    parser = ROOM.command_line(__doc__)
    parser.add_argument("--card", choices=CARDS, default=Stack.card)
    parser.add_argument("--sdk", choices=SDKS, default=Stack.sdk)
    return ROOM.main(parser)


if __name__ == "__main__":
    sys.exit(main())
