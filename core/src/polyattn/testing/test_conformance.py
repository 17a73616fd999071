"""The kit under pytest: one test a backend, case and dtype; run it with the plugin `polyattn.testing.plugin`."""

from __future__ import annotations

import torch

from polyattn.testing.cases import ALL_CASES, Case
from polyattn.testing.check import check
from polyattn.testing.claims import unaccepted_claims
from polyattn.testing.compare import tolerance_problems
from polyattn.testing.targets import Target


def test_case(conformance_case: tuple[Target, Case, torch.dtype]) -> None:
    """Right where it is claimed, refused with a reason or served exactly where it is not."""
    target, case, dtype = conformance_case
    assert check(case, target, dtype).problems == ()


def test_declared_tolerances_are_within_the_ceilings(conformance_target: Target) -> None:
    """A backend may promise more than the kit asks, never less."""
    assert tolerance_problems(conformance_target.backend.tolerances) == []


def test_every_claim_is_accepted_for_some_case(conformance_target: Target) -> None:
    """A claim that every case of it is refused for says nothing."""
    assert unaccepted_claims(conformance_target, ALL_CASES) == ()
