"""Each kind of platform plugin: found, declined, broken, slow, oddly packaged. None of them stops the others."""

import json

import pytest

from polyattn.discovery import PlatformReport

REPORTS = """
result = {report.name: report.as_dict() for report in platforms()}
lines = [str(report) for report in platforms()]
"""


def test_found_and_declined(sites):
    sites.add_platform("toy", priority=7, probe="Found('2 toy devices', devices=2)")
    sites.add_platform("absentee", probe="Declined('no /dev/absentee')")
    sites.add_platform("future", api=2)
    sites.add(
        "record-attn",
        {"toy_record": "from polyattn.vendor import *\n"
         "PLATFORM = Platform('record', 'rec', 3, lambda: Found(), lambda d: None, ())"},
        {"record": "toy_record:PLATFORM"},
    )  # fmt: skip
    answer = sites.ask(REPORTS + "import sys; result = [result, lines, sys.asked]", {"POLYATTN_STRICT": "0"})
    reports, lines, asked = answer.result
    toy = reports["toy"]
    assert toy["status"] == "accepted"
    assert toy["reason"] == ""
    assert toy["traceback"] == ""
    assert (toy["distribution"], toy["version"], toy["entry_point"]) == ("toy-attn", "1.0", "toy_toy_attn:platform")
    assert (toy["device_type"], toy["priority"], toy["api"], toy["devices"]) == ("toy", 7, 1, 2)
    assert toy["detail"] == "2 toy devices"
    assert 0 < toy["seconds"] < 1
    assert reports["record"]["status"] == reports["cpu"]["status"] == "accepted"
    assert reports["absentee"]["status"] == "declined"
    assert reports["absentee"]["reason"] == "no /dev/absentee"
    assert reports["future"]["status"] == "declined"
    assert "level 2" in reports["future"]["reason"]
    assert "level 1" in reports["future"]["reason"]
    assert "probe future" not in asked, "another level's probe cannot be trusted to mean what ours means"
    assert lines[0] == "toy: accepted (toy-attn 1.0): device type toy, priority 7; 2 toy devices"
    assert "absentee: declined (absentee-attn 1.0): no /dev/absentee" in lines
    assert PlatformReport(**toy).as_dict() == json.loads(json.dumps(toy))


BROKEN = {
    "syntax": ("def platform(:", "SyntaxError"),
    "attribute": ("", "AttributeError"),
    "os": ("raise OSError('libtoy.so.1: cannot open shared object file')", "OSError: libtoy.so.1: cannot open"),
    "missing": ("import toy_runtime_that_is_not_there", "ModuleNotFoundError"),
    "exits": ("import sys; sys.exit('license expired')", "SystemExit: license expired"),
    "number": ("platform = 3", "gives int, not a polyattn.vendor.Platform"),
    "nothing": ("def platform(): pass", "gives NoneType, not a polyattn.vendor.Platform"),
    "takes_arguments": ("def platform(device): pass", "TypeError"),
    "renamed": (None, "its platform 'other'"),
    "probe_raises": (None, "ZeroDivisionError"),
    "probe_lies": (None, "its probe returned bool, not Found or Declined"),
    "priority_text": (None, "Platform.priority must be an int, not 'high'"),
    "recursive": (None, "asked polyattn for the platform being detected"),
}


def test_a_broken_plugin_is_one_warning_and_one_report(sites, plugin):
    from_source = {name: source for name, (source, _) in BROKEN.items() if source is not None}
    for name, source in from_source.items():
        sites.add(f"{name}-attn", {f"toy_{name}": source}, {name: f"toy_{name}:platform"}, version="2.3")
    odd = {
        "renamed": plugin("other"),
        "probe_raises": plugin("probe_raises", probe="1 / 0"),
        "probe_lies": plugin("probe_lies", probe="True"),
        "priority_text": plugin("priority_text", priority="'high'"),
        "recursive": plugin("recursive", probe="__import__('polyattn.discovery').discovery.current_platform.name"),
    }
    for name, source in odd.items():
        sites.add(f"{name}-attn", {f"toy_{name}": source}, {name: f"toy_{name}:platform"}, version="2.3")
    sites.add("nowhere-attn", {}, {"nowhere": "not a reference!"}, version="2.3")
    sites.add_platform("toy")
    answer = sites.ask(REPORTS + "result = [result, current_platform.name]")
    assert answer.error is None
    reports, current = answer.result
    assert current == "toy", "the good one works"
    for name, needle in [*((name, needle) for name, (_, needle) in BROKEN.items()), ("nowhere", "")]:
        report = reports[name]
        assert report["status"] == "failed"
        assert needle in report["reason"]
        assert "Traceback" in report["traceback"]
        told = [text for text in answer.told if f"'{name}'" in text]
        assert len(told) == 1, (name, answer.told)
        for fact in (f"{name}-attn", "2.3", report["reason"], report["entry_point"]):
            assert fact in told[0]
    assert len(answer.told) == len(BROKEN) + 1
    assert {w["file"] for w in answer.warnings} == {"scenario.py"}, "warnings point at the caller's line"


def test_slow_plugins_say_so(sites):
    sites.add_platform("sloth", probe="__import__('time').sleep(1.05) or Found('asleep')")
    report = sites.ask(REPORTS).result["sloth"]
    assert report["status"] == "accepted"
    assert report["seconds"] > 1
    assert report["detail"].startswith("asleep; slow: 1.")
    assert "to import and probe" in report["detail"]


@pytest.mark.parametrize("bad", [b"[console_scripts]\nno equals sign\n", b"[console_scripts]\nx = \xff\xfe:y\n"])
def test_an_unrelated_broken_distribution_does_not_concern_us(sites, bad):
    sites.add("unrelated", entry_points=bad)
    sites.add_platform("toy")
    answer = sites.ask("result = [[r.name for r in platforms()], current_platform.name]")
    assert answer.error is None
    assert answer.told == []
    assert answer.result == [["toy", "cpu"], "toy"]


def test_our_own_unreadable_entry_points_are_reported(sites):
    sites.add("mangled-attn", entry_points=b"[polyattn.platforms]\nmangled = \xff\xfe:platform\n")
    answer = sites.ask(REPORTS)
    report = answer.result["mangled-attn"]
    assert report["status"] == "failed"
    assert "entry_points.txt cannot be read" in report["reason"]
    assert len(answer.told) == 1
    assert "mangled-attn" in answer.told[0]


def test_the_embedded_platform_needs_no_metadata(sites):
    sites.add("polyattn", version="0.0")  # a distribution without entry points hides the real one
    answer = sites.ask("result = [r.as_dict() for r in platforms()]")
    assert [(r["name"], r["status"], r["entry_point"]) for r in answer.result] == [
        ("cpu", "accepted", "polyattn.cpu:platform")
    ]
