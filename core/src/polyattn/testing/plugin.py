"""The pytest plugin: which backends the kit puts to the test, and what a test marked with a vendor needs.

    pytest -p polyattn.testing.plugin --pyargs polyattn.testing --polyattn-backend cuda:fa3

It is loaded only by name, never by itself, and imports torch only when tests are collected that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

VENDORS = ("cuda", "rocm", "npu", "xpu", "musa")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options, both repeatable."""
    group = parser.getgroup("polyattn")
    group.addoption(
        "--polyattn-backend",
        action="append",
        default=[],
        metavar="[PLATFORM:]BACKEND",
        help="put this backend to the test (default: all backends of all accepted platforms)",
    )
    group.addoption(
        "--require-platform",
        action="append",
        default=[],
        metavar="PLATFORM",
        help="fail, where tests would be skipped because this platform is absent",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The markers, so that --strict-markers knows them."""
    for vendor in VENDORS:
        config.addinivalue_line("markers", f"{vendor}: short for platform('{vendor}')")
    config.addinivalue_line("markers", "platform(name): skipped, with detection's reason, where it is absent")
    config.addinivalue_line("markers", "distributed: starts several processes")
    config.addinivalue_line("markers", "emulated: runs on an emulator of a vendor's native ops, not on its hardware")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail under --require-platform, where a platform that the test needs is absent."""
    needed = [vendor for vendor in VENDORS if item.get_closest_marker(vendor) is not None]
    needed += [marker.args[0] for marker in item.iter_markers("platform")]
    for platform in needed:
        _need(platform, required=platform in item.config.getoption("--require-platform"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a (backend, case, dtype) for `conformance_case`, one a backend for `conformance_target`."""
    if "conformance_case" in metafunc.fixturenames:
        metafunc.parametrize("conformance_case", _cases(metafunc.config))
    if "conformance_target" in metafunc.fixturenames:
        metafunc.parametrize("conformance_target", _targets(metafunc.config))


def _need(platform: str, *, required: bool) -> None:
    from polyattn.testing.targets import why_absent

    reason = why_absent(platform)
    if reason is None:
        return
    if required:
        pytest.fail(f"--require-platform={platform}: {reason}", pytrace=False)
    pytest.skip(reason)


def _cases(config: pytest.Config) -> list[Any]:
    """(target, case, dtype); one stand-in for a backend that cannot run, to be skipped or failed."""
    from polyattn.testing.cases import ALL_CASES
    from polyattn.testing.conformance import case_label

    found = []
    for parameter in _targets(config):
        (target,) = parameter.values
        if target is None:
            found.append(parameter)
            continue
        found += [
            pytest.param((target, case, dtype), id=f"{target.name} {case_label(case, dtype)}")
            for case in ALL_CASES
            for dtype in target.dtypes_of(case)
        ]
    return found


def _targets(config: pytest.Config) -> list[Any]:
    from polyattn.testing.targets import targets, why_absent

    found: dict[str, Any] = {}
    for platform in config.getoption("--require-platform"):
        if why_absent(platform) is not None:
            found[platform] = pytest.param(None, id=platform, marks=pytest.mark.platform(platform))
    asked: Sequence[str | None] = config.getoption("--polyattn-backend") or [None]
    for name in asked:
        platform, colon, _ = (name or "").partition(":")
        if colon and why_absent(platform) is not None:
            found[platform] = pytest.param(None, id=name, marks=pytest.mark.platform(platform))
            continue
        try:
            chosen = targets(None, name)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        for target in chosen:
            missing = target.missing()
            found[target.name] = (
                pytest.param(None, id=target.name, marks=pytest.mark.skip(reason="; ".join(missing)))
                if missing
                else pytest.param(target, id=target.name)
            )
    return list(found.values())
