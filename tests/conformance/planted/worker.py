"""Runs the kit on planted backends, in a process that has them installed: arguments backend=structure+..., JSON out."""

import json
import sys

import torch

from polyattn.testing import run_conformance

torch.set_num_threads(1)
found = {}
for argument in sys.argv[1:]:
    backend, _, structures = argument.partition("=")
    report = run_conformance(
        f"cpu:{backend}", structures=structures.split("+") if structures else None, dtypes=[torch.float32]
    )
    found[backend] = report.as_dict()
json.dump(found, sys.stdout)
