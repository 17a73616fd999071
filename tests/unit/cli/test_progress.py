"""The bar of long commands: on a terminal's standard error alone, drawn only between what is timed."""

import io
import sys
import threading

import pytest

from polyattn.cli.progress import progress

NAMES = ("tiny", "flux")
QUICK = ("bench", "--shapes", "tiny", "--backends", "sdpa", "--seconds", "0.05")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_terminal(monkeypatch):
    """Standard error becomes one; pytest gives a test its own streams after the fixtures."""

    def sit():
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return sit


def test_each_name_is_shown_when_its_turn_begins(at_terminal):
    terminal = at_terminal()
    with progress(NAMES) as begins:
        for done, name in enumerate(NAMES):
            before = len(terminal.getvalue())
            begins(name)
            assert name in terminal.getvalue()[before:]
            assert f"{done}/2" in terminal.getvalue()[before:]


def test_nothing_draws_while_something_is_timed(at_terminal):
    at_terminal()
    with progress(NAMES) as begins:
        begins("tiny")
        assert not [thread for thread in threading.enumerate() if type(thread).__module__.startswith("rich")]


def test_bench_keeps_it_apart_from_its_answer(polyattn, at_terminal):
    terminal = at_terminal()
    assert polyattn(*QUICK, "--json").json["shapes"].keys() == {"tiny"}
    assert "tiny" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("\x1b[2K"), "the line is erased at the end"


def test_what_is_no_terminal_gets_none(polyattn, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert polyattn(*QUICK, "--json").err == ""


def test_without_rich_there_is_none(at_terminal, monkeypatch):
    terminal = at_terminal()
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress(NAMES) as begins:
        begins("tiny")
    assert terminal.getvalue() == ""


def test_an_error_passes_and_the_bar_goes(at_terminal):
    terminal = at_terminal()
    with pytest.raises(KeyError), progress(NAMES) as begins:
        begins({}["tiny"])
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is shown again"
