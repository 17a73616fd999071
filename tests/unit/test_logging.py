"""What is told goes to stdlib logging under "polyattn": warnings, detection, routes; nothing is printed unasked."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch

import polyattn as pa
from polyattn.environment import PolyattnWarning, reload_environment, warn

LOUD = """
import logging, torch
import polyattn as pa
{configured}
q = torch.randn(1, 4, 2, 8)
pa.attention(q, q, q)
pa.attention(q, q, q)
"""


@pytest.fixture(autouse=True)
def _anew():
    reload_environment()
    yield
    reload_environment()


def said(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_warning_with_a_key_is_told_once_and_is_in_the_log(caplog):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for text in ("first", "second"):
            warn(text, key=("a", 1))
        warn("other", key=("a", 2))
        warn("each time")
        warn("each time")
    texts = ["first", "other", "each time", "each time"]
    assert [str(one.message) for one in told] == texts
    assert said(caplog, logging.WARNING) == texts
    assert {record.name for record in caplog.records} == {"polyattn"}


@pytest.mark.filterwarnings("error")
def test_a_warning_that_a_filter_makes_an_error_is_one_each_time():
    for _ in range(2):
        with pytest.raises(PolyattnWarning, match="again"):
            warn("again", key="b")


def test_a_strict_warning_is_raised_each_time(monkeypatch):
    monkeypatch.setenv("POLYATTN_STRICT", "1")
    reload_environment()
    for _ in range(2):
        with pytest.raises(PolyattnWarning, match="POLYATTN_STRICT"):
            warn("again", key="c")


def test_a_reload_begins_anew():
    for _ in range(2):
        with pytest.warns(PolyattnWarning, match="once"):
            warn("once", key="d")
        reload_environment()


def test_detection_and_each_new_route_are_logged_once(caplog):
    caplog.set_level(logging.DEBUG, "polyattn")
    q = torch.randn(1, 4, 2, 8)
    for _ in range(2):
        pa.attention(q, q, q)
    assert [text for text in said(caplog, logging.INFO) if text.startswith("cpu: accepted")]
    (route,) = said(caplog, logging.DEBUG)
    assert route.startswith("cpu:sdpa takes [q[1, 4, 2, 8]")


@pytest.mark.parametrize(("configured", "lines"), [("", 0), ("logging.basicConfig(level=logging.DEBUG)", 1)])
def test_nobody_hears_of_it_who_did_not_ask(configured, lines):
    command = [sys.executable, "-W", "error", "-c", LOUD.format(configured=configured)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.count("DEBUG:polyattn:cpu:sdpa takes") == lines
    assert bool(done.stderr) == bool(lines)
