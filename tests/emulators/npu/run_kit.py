"""The conformance kit over a backend on the emulated device, in this process; JSON on standard output.

    EMULATED_PACKAGES=FOLDER python -m tests.emulators.npu.run_kit npu:sdpa --structures dense --dtypes float16

What passes here is our call into the vendor's ops and what we make of their answers; the vendor's kernels do not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.emulators.npu import torch_npu_module
from tests.emulators.npu.stack import current


def main() -> int:
    """The command line; the exit status is 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--structures", type=lambda text: text.split(","))
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bfloat16", "float16", "float32"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sys.path[:0] = filter(None, os.environ.get("EMULATED_PACKAGES", "").split(os.pathsep))
    torch_npu_module.install()
    with tempfile.TemporaryDirectory() as site:
        sys.path.insert(0, _with_torch_npu(Path(site)))

        from polyattn.testing import run_conformance

        dtypes = [getattr(torch, name) for name in asked.dtypes]
        report = run_conformance(asked.backend, structures=asked.structures, dtypes=dtypes).as_dict()
    json.dump(report, sys.stdout)
    return 1 if report["failures"] else 0


def _with_torch_npu(site: Path) -> str:
    """The folder, with the record of an installed torch_npu of the version passed for."""
    info = site / f"torch_npu-{current().torch_npu}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {current().torch_npu}\n")
    return str(site)


if __name__ == "__main__":
    sys.exit(main())
