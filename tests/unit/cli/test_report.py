"""How sections are printed: plain or rich, coloured or not, always the same words."""

import io
import json

import pytest
from rich.console import Console

from polyattn.cli import report
from polyattn.cli.report import Section, plain, print_rich

SECTIONS = [
    Section("pairs", [("request", "q[1, 2, 3, 64] on [bold]cpu[/bold]"), ("route", "cpu:sdpa")]),
    Section(
        "table", [("cpu:sdpa", "chosen", "x" * 150), ("cpu:blocked", "", ":smile: sdpa first")], ("backend", "", "why")
    ),
    Section("lines", [("first line",), ("  second, indented",)]),
]


def words(text):
    """What was written, whatever stands around it and wherever it was wrapped."""
    return "".join(character for character in text if character not in " \n─│+|-").lower()


def test_plain_text_is_aligned():
    section = Section(
        "backends", [("cpu:sdpa", "yes", "a\nb"), ("cpu:x", "cannot run", "")], ("backend", "verdict", "why")
    )
    assert plain([section]) == (
        "backends\n  backend   verdict     why\n  cpu:sdpa  yes         a b\n  cpu:x     cannot run\n"
    )


@pytest.mark.parametrize("width", [40, 80, 400])
def test_rich_says_the_same_words(width):
    stream = io.StringIO()
    print_rich(SECTIONS, Console(file=stream, width=width, no_color=True, markup=False, emoji=False, highlight=False))
    shown = words(stream.getvalue())
    for section in SECTIONS:
        for cell in (section.title, *section.header, *(cell for row in section.rows for cell in row)):
            if width == 400:
                assert words(cell) in shown
            assert all(shown.count(character) >= words(cell).count(character) for character in set(words(cell)))
    assert len(shown) == len(words(plain(SECTIONS))), "nothing is cut off, nothing is added"


@pytest.fixture
def printed(capsys, monkeypatch):
    def run(**environment):
        for name, text in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, text)
        report.show(SECTIONS)
        return capsys.readouterr().out

    return run


def test_what_is_not_a_terminal_gets_plain_text(printed):
    assert printed() == plain(SECTIONS)


def test_a_terminal_gets_colours(printed):
    assert "\x1b[32mchosen" in printed(FORCE_COLOR="1")


def test_no_color_leaves_no_escape(printed):
    text = printed(FORCE_COLOR="1", NO_COLOR="1")
    assert "─" in text, "still rich's table"
    assert "\x1b" not in text


def test_without_rich_it_is_plain_text(printed, monkeypatch):
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert printed(FORCE_COLOR="1") == plain(SECTIONS)


def test_empty_sections_are_left_out(capsys):
    report.show([Section("nothing", [], ("a", "b")), Section("something", [("a",)])])
    assert capsys.readouterr().out == "something\n  a\n"


def test_a_stream_that_cannot_say_it_gets_an_escape(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    report.show([Section("näme", [("昇腾",)])])
    stream.flush()
    assert stream.buffer.getvalue() == b"n\\xe4me\n  \\u6607\\u817e\n"


def test_json_takes_what_vendors_put_into_facts(capsys):
    report.show_json({"build": {"archs": {90}}})
    assert json.loads(capsys.readouterr().out) == {"build": {"archs": "{90}"}}
