"""Runs the kit on planted backends, in a process that has them installed: arguments backend=structure+..., JSON out.

Beside the reports, the automatic choice among all of them: a plain call's route, and the reasons against the others.
"""

import json
import sys

import torch

import polyattn as pa
from polyattn.testing import run_conformance

reports = {}
for argument in sys.argv[1:]:
    backend, _, structures = argument.partition("=")
    report = run_conformance(
        f"cpu:{backend}", structures=structures.split("+") if structures else None, dtypes=[torch.float32]
    )
    reports[backend] = report.as_dict()
q = torch.randn(1, 4, 2, 8)
with pa.record_routes() as log:
    pa.attention(q, q, q)
(entry,) = log.entries
json.dump({"reports": reports, "automatic": {"route": entry.route, "reasons": entry.reasons}}, sys.stdout)
