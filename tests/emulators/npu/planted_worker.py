"""Runs the kit over each planted backend, with lint and without, in one process; what was wrong goes out as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.emulators.npu import planted, torch_npu_module
from tests.emulators.npu.stack import LintError, using

#: Kind of structure -> the cases that a planted backend of it runs.
CASES = {"mask": ("mask/plain", "mask/rows_of_nothing"), "packed": ("packed/plain",)}


def main() -> None:
    """{backend: {"lint": problems, "bare": problems, "native": cases}}; the last line of standard output."""
    torch.set_num_threads(1)
    torch_npu_module.install()
    found: dict[str, Any] = {}
    for name, (kind, causal) in planted.PLANTED.items():
        cases = CASES.get(kind, ("dense/causal", "dense/plain") if causal else ("dense/plain",))
        found[name] = {"native": 0}
        for key, lint in (("lint", True), ("bare", False)):
            with using(lint=lint):
                found[name][key] = _problems(name, kind, cases, found[name])
    found["laser_outliers"] = _laser()
    json.dump(found, sys.stdout)


def _problems(name: str, kind: str, cases: tuple[str, ...], counted: dict[str, int]) -> list[str]:
    from polyattn.testing import run_conformance

    problems = []
    for case in cases:
        report = run_conformance(f"npu:{name}", structures=[kind], dtypes=[torch.bfloat16], named=case)
        problems += [f"{failure.case}: {problem}" for failure in report.failures for problem in failure.problems]
        counted["native"] += sum(results["native"] for results in report.counts[f"npu:{name}"].values())
    return problems


def _laser() -> dict[str, Any]:
    """bfloat16 activations whose products leave float16, as a model's outliers do."""
    try:
        import mindiesd
    except ImportError as error:
        return {"absent": str(error)}
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2048, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    q[:, 5] *= 300
    k[:, 9] *= 300
    answers: dict[str, Any] = {"native": 1}
    for key, lint in (("lint", True), ("bare", False)):
        with using(lint=lint):
            try:
                out = mindiesd.attention_forward(
                    q.npu(), k.npu(), v.npu(), opt_mode="manual", op_type="ascend_laser_attention", scale=0.125
                )
                answers[key] = [f"{int(out.cpu().isnan().any(-1).sum())} rows of NaN"]
            except LintError as error:
                answers[key] = [str(error)]
    return answers


if __name__ == "__main__":
    main()
