"""Runs the kit over one NPU backend, in a process that gets the emulated device: a question in JSON, JSON out."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from tests.emulators.npu import registry, torch_npu_module
from tests.emulators.npu.stack import Stack, lints, using


def main() -> None:
    """argv[1] has the arguments of `run_kit.run_kit`; the report goes to standard output, as its last line."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with using(**asked["stack"]) as stack:
        torch_npu_module.install()

        from polyattn.testing import conformance, run_conformance
        from tests.emulators.npu import host_pages, long_cases

        conformance.ALL_CASES = long_cases.CASES if asked["long"] else (*conformance.ALL_CASES, *host_pages.CASES)
        report = run_conformance(
            asked["backend"],
            progress=_tell if asked["verbose"] else None,
            structures=asked["structures"],
            dtypes=[getattr(torch, name) for name in asked["dtypes"]],
            named=asked["named"],
            shard=tuple(asked["shard"]),
        )
        answer = report.as_dict() | {"stack": _stack(stack), "ops": dict(registry.counts), "lints": lints}
    json.dump(answer, sys.stdout)


def _stack(stack: Stack) -> dict[str, Any]:
    """What was passed for, and which real package of the vendor ran."""
    facts = {name: value for name, value in asdict(stack).items() if isinstance(value, str | bool)}
    package = sys.modules.get("mindiesd")
    if package is not None:
        facts |= {"mindiesd_package": importlib.metadata.version("mindiesd"), "mindiesd_file": package.__file__}
    return facts


def _tell(done: int, total: int, label: str) -> None:
    sys.stderr.write(f"{done}/{total} {label}\n")


if __name__ == "__main__":
    main()
