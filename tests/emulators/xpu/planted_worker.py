"""Runs the kit over the planted backends of a module, in one process; what was wrong with each goes out as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch


def main() -> None:
    """argv: the module with PLANTED, PREFIX and `install`, the one with `using` -> {backend: [problems, native]}."""
    planted, stack = (importlib.import_module(name) for name in sys.argv[1:])
    torch.set_num_threads(1)
    planted.install()

    from polyattn.testing import run_conformance

    found: dict[str, Any] = {}
    with stack.using(lint=True):
        for name, cases in planted.PLANTED.items():
            problems, native = [], 0
            for case in cases:
                structure = case.partition("/")[0]
                asked = {"structures": [structure], "dtypes": [torch.bfloat16], "named": case}
                report = run_conformance(f"cpu:{planted.PREFIX}{name}", **asked)
                problems += [f"{failure.case}: {words}" for failure in report.failures for words in failure.problems]
                native += sum(counts["native"] for counts in next(iter(report.counts.values())).values())
            found[name] = [problems, native]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
