"""Runs the kit on planted backends, in a process that has them installed: arguments in, JSON out.

An argument is backend=structure+..., or backend=structure+...:word for the cases that have the word in their names.

Beside the reports, the claims of those that quantise for which no case is accepted, and the automatic choice among all
of them: a plain call's route, and the reasons against the others.
"""

import json
import sys

import torch

import polyattn as pa
from polyattn.testing import run_conformance
from polyattn.testing.cases import ALL_CASES
from polyattn.testing.claims import unaccepted_claims
from polyattn.testing.targets import targets

reports = {}
for argument in sys.argv[1:]:
    backend, _, asked = argument.partition("=")
    structures, _, word = asked.partition(":")
    report = run_conformance(
        f"cpu:{backend}", structures=structures.split("+") if structures else None, dtypes=[torch.float32], named=word
    )
    reports[backend] = report.as_dict()
unaccepted = {
    name: unaccepted_claims(*targets("cpu", name), ALL_CASES) for name in reports if name.endswith("quantises")
}
q = torch.randn(1, 4, 2, 8)
with pa.record_routes() as log:
    pa.attention(q, q, q)
(entry,) = log.entries
automatic = {"route": entry.route, "reasons": entry.reasons}
json.dump({"reports": reports, "unaccepted claims": unaccepted, "automatic": automatic}, sys.stdout)
