"""The CPU's backends against the kit: every case of every structure, in every dtype."""

import pytest

from polyattn.testing.cases import ALL_CASES
from polyattn.testing.claims import unaccepted_claims
from polyattn.testing.conformance import run_conformance
from polyattn.testing.targets import targets

STRUCTURES = list(dict.fromkeys(case.structure for case in ALL_CASES))


@pytest.fixture(params=[target.name for target in targets("cpu")])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_case_is_right(backend: str, structure: str) -> None:
    report = run_conformance(backend, structures=[structure])
    assert [str(failure) for failure in report.failures] == []
    counts = report.counts[backend][structure]
    assert counts["refused"] < counts["native"]


def test_every_claim_is_accepted_for_some_case(backend: str) -> None:
    (target,) = targets(None, backend)
    assert unaccepted_claims(target, ALL_CASES) == ()


def test_case_names_are_unique_and_say_their_structure() -> None:
    names = [case.name for case in ALL_CASES]
    assert len(names) == len(set(names))
    assert all(case.name.startswith(f"{case.structure}/") for case in ALL_CASES)
