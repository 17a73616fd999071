"""`polyattn info`: what a bug report needs, whatever is broken."""

import json
import platform as host
from importlib import metadata

import pytest
import torch

import polyattn as pa
from tests.unit.cli.conftest import add_distribution, add_kernels

TABLES = ("software", "packages", "platforms", "devices", "backends", "capabilities of cpu", "environment")


def by_name(rows, key="name"):
    return {row[key]: row for row in rows}


def test_a_healthy_machine(polyattn):
    answer = polyattn("info", "--json")
    facts = answer.json
    assert answer.code == 0
    assert facts["problems"] == []
    assert facts["software"]["polyattn"] == pa.__version__
    assert host.python_version() in facts["software"]["python"]
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["build"]["cuda"] == torch.version.cuda
    assert {"hip", "xpu"} <= set(facts["torch"]["build"])
    assert facts["packages"]["torch"] == metadata.version("torch")  # torch itself may add its build, as in "+cu124"
    assert [report["name"] for report in facts["platforms"]] == [report.name for report in pa.platforms()]
    assert facts["current_platform"]["name"] == pa.current_platform.name
    cpu = by_name(facts["in_use"], "platform")["cpu"]
    assert cpu["devices"][0]["arch"] == host.machine()
    assert {backend["status"] for backend in cpu["backends"]} == {"usable"}
    assert "LSE" in cpu["capabilities"]["backends"]["sdpa"]["capabilities"]
    assert set(facts["environment"]["variables"]) == set(pa.environment.VARIABLES)


def test_the_tables_say_what_the_json_says(polyattn, add_platform, monkeypatch):
    add_platform(probe="Found('2 toys', devices=2)")
    monkeypatch.setenv("TOY_MODE", "quick")
    facts, text = polyattn("info", "--json").json, polyattn("info").out
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert [title for title in titles if title in TABLES] == list(TABLES)
    for report in facts["platforms"]:
        line = next(line for line in text.splitlines() if line.split()[:2] == [report["name"], report["status"]])
        assert report["reason"] in line
        assert report["detail"] in line
    for used in facts["in_use"]:
        for backend in used["backends"]:
            assert f"  {backend['backend']}  " in text
        for device in used["devices"]:
            assert f"  {device['device_type']}:{device['index']}  " in text
        assert f"capabilities of {used['platform']}" in titles
    for said in (*facts["software"].values(), facts["torch"]["version"], *facts["packages"]):
        assert said in text


def test_backends_say_why_they_cannot_be_used(polyattn, add_platform):
    old = "lambda d: Machine('toy', 'toy', versions={'toy-kernels': '1.0'})"
    add_platform(probe="Found()", machine=old)
    fast, plain = by_name(polyattn("info", "--json").json["in_use"], "platform")["toy"]["backends"]
    assert (fast["backend"], fast["status"]) == ("toy:fast", "missing package")
    assert fast["reasons"] == ["package toy-kernels 1.0 is older than 2.0: pip install toy-kernels"]
    assert fast["requires"] == ["toy-kernels >= 2.0"]
    assert (plain["status"], plain["reasons"], plain["slots"]) == ("usable", [], ["plain", "packed"])
    text = polyattn("info").out
    assert "toy:fast     missing package  toy-kernels >= 2.0  package toy-kernels 1.0 is older" in text


def test_a_backend_that_refuses_this_machine_is_not_usable(polyattn, add_platform):
    add_platform(
        probe="Found()", machine="lambda d: Machine('toy', 'toy', arch='toy1', versions={'toy-kernels': '2.0'})"
    )
    fast, plain = by_name(polyattn("info", "--json").json["in_use"], "platform")["toy"]["backends"]
    assert (fast["status"], plain["status"]) == ("not usable", "usable")
    assert fast["reasons"] == ["toy1 is too old for it"]


#: A toy's backend, as expressions: kind, dtypes and check; and what info says against it, nothing where it is usable.
UNLIKE = {
    "only packed, refused": ("packed", "HALF", "('no kernels', f'scale {request.scale}')", "no kernels"),
    "many rows alone": ("dense", "HALF", "() if request.q.shape[1] >= 2048 else ('few rows',)", ""),
    "no dtype": ("dense", "frozenset()", "()", "no slot of it claims both a structure and a dtype: it takes no call"),
    "each its own reason": (
        "dense", "HALF | SINGLE", "(f'not {request.dtype}',)",
        "not bfloat16 (asked for q[1, 512, 8, 64] k[1, 512, 8, 64] v[1, 512, 8, 64] bfloat16 on toy:0, dense)",
    ),
    "broken": ("dense", "HALF", "1 / 0", "its check raised ZeroDivisionError: division by zero"),
    "ends the process": ("dense", "HALF", "exit('bye')", "it cannot be asked: SystemExit: bye"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
def test_what_takes_no_call_on_this_machine_is_not_usable_with_the_reasons_that_every_call_meets(
    polyattn, add_platform, case
):
    kind, dtypes, check, reasons = UNLIKE[case]
    slot = f"Slot('toy:f', Features(kinds=frozenset({{{kind!r}}}), dtypes={dtypes}))"
    add_platform(probe="Found()", backends=f"(Backend('one', ({slot},), check=lambda request, machine: {check}),)")
    (one,) = by_name(polyattn("info", "--json").json["in_use"], "platform")["toy"]["backends"]
    assert "; ".join(one["reasons"]) == reasons
    assert one["status"] == ("usable" if not reasons else "error" if "SystemExit" in reasons else "not usable")


def test_vendor_variables_are_shown_as_set_even_where_the_platform_declined(polyattn, add_platform, monkeypatch):
    add_platform()
    monkeypatch.setenv("TOY_MODE", "")
    monkeypatch.delenv("TOY_LOG", raising=False)
    variables = polyattn("info", "--json").json["vendor_variables"]
    assert variables["TOY_MODE"] == {"value": "", "platforms": ["toy"]}
    assert variables["TOY_LOG"]["value"] is None
    lines = [line.split() for line in polyattn("info").out.splitlines()]
    assert ["TOY_MODE", "''", "toy"] in lines
    assert ["toy", "TOY_LOG"] in lines, "named among those that are not set"


@pytest.mark.parametrize(
    ("broken", "where", "said"),
    [
        ({"probe": "1 / 0"}, "traceback of platform toy", "ZeroDivisionError"),
        (
            {"probe": "Found()", "backends": "'toy_kernels_nowhere:ALL'"},
            "  toy:*",
            "No module named 'toy_kernels_nowhere'",
        ),
        ({"probe": "Found()", "machine": "lambda d: 1 / 0"}, "  toy:0", "ZeroDivisionError"),
        ({"probe": "Found()", "machine": "lambda d: None"}, "  toy:0", "NoneType"),
        ({"probe": "Found()", "backends": "(1,)"}, "  toy:*", "not int"),
        ({"probe": "Found(devices='2')"}, "  toy:*", "'str' object cannot be interpreted as an integer"),
        ({"source": "import sys; sys.exit('license expired')"}, "traceback of platform toy", "license expired"),
    ],
)
def test_a_broken_platform_is_shown_and_stops_nothing(polyattn, add_platform, broken, where, said):
    add_platform(**broken)
    answer = polyattn("info")
    assert answer.code == 0, "the current platform, cpu, works"
    assert any(line.startswith(where) for line in answer.out.splitlines())
    assert said in answer.out
    assert "capabilities of cpu" in answer.out
    assert polyattn("info", "--json").code == 0


def test_the_current_platform_without_a_usable_backend_is_a_problem(polyattn, add_platform):
    add_platform(probe="Found()", priority=99, backends="'toy_kernels_nowhere:ALL'")
    answer = polyattn("info", "--json")
    assert answer.code == 1
    assert answer.json["problems"] == ["platform 'toy' has no usable backend; its own section says why"]
    assert answer.json["current_platform"]["name"] == "toy"
    assert polyattn("info").out.startswith("problems\n")


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("POLYATTN_STRICT", "perhaps", "not a switch"),
        ("POLYATTN_PLATFORM", "abacus", "names no platform"),
        ("POLYATTN_BACKEND", "abacus", "'abacus'"),
    ],
)
def test_a_wrong_variable_of_ours_is_a_problem_and_is_shown(polyattn, monkeypatch, variable, text, said):
    monkeypatch.setenv(variable, text)
    answer = polyattn("info", "--json")
    assert answer.code == 1
    assert said in answer.json["problems"][0]
    assert answer.json["environment"]["variables"][variable] == text
    assert f"{variable}" in polyattn("info").out


def test_warnings_are_part_of_the_report(polyattn, add_platform, monkeypatch):
    add_platform(probe="1 / 0")
    answer = polyattn("info", "--json")
    assert answer.err == ""
    assert any(text.startswith("PolyattnWarning: platform plugin 'toy'") for text in answer.json["warnings"])
    monkeypatch.setenv("POLYATTN_STRICT", "1")
    pa.reload_environment()
    strict = polyattn("info", "--json")
    assert strict.code == 1
    assert "platform plugin 'toy'" in strict.json["problems"][0]
    assert by_name(strict.json["platforms"])["toy"]["status"] == "failed", "the report stays readable"


def test_third_party_backends(polyattn, tmp_path, monkeypatch, no_vendors):
    good = "from polyattn.vendor import *\nEXTRA = Backend('extra', (Slot('m:f', Features()),))"
    modules = {"extra_good_cli": good, "extra_bad_cli": "raise OSError('libextra.so')"}
    entries = {
        "cpu.extra": "extra_good_cli:EXTRA",
        "cpu.bad": "extra_bad_cli:EXTRA",
        "cuda.late": "extra_good_cli:EXTRA",
    }
    add_distribution(tmp_path, monkeypatch, "extra-attn", modules, {}, entries)
    answer = polyattn("info", "--json")
    reports = by_name(answer.json["third_party_backends"], "backend")
    assert {name: report["status"] for name, report in reports.items()} == {
        "extra": "accepted",
        "bad": "failed",
        "late": "skipped",
    }
    assert "libextra.so" in reports["bad"]["reason"]
    assert "extra" in by_name(answer.json["in_use"], "platform")["cpu"]["capabilities"]["backends"]
    assert "cpu:bad    failed    extra-attn 1.5" in polyattn("info").out


def test_packages_that_a_third_party_backend_requires_are_seen(polyattn, tmp_path, monkeypatch, no_vendors):
    add_kernels(tmp_path, monkeypatch, version="1.9")
    cpu = by_name(polyattn("info", "--json").json["in_use"], "platform")["cpu"]
    fast = by_name(cpu["backends"], "backend")["cpu:fast"]
    assert fast["reasons"] == ["package fast-kernels 1.9 is older than 2.0: pip install fast-kernels"]
    assert cpu["devices"][0]["versions"]["fast-kernels"] == "1.9"
    add_kernels(tmp_path, monkeypatch, version="2.1")
    cpu = by_name(polyattn("info", "--json").json["in_use"], "platform")["cpu"]
    assert by_name(cpu["backends"], "backend")["cpu:fast"]["status"] == "usable"
    assert polyattn("info", "--machine", "cpu").json["versions"]["fast-kernels"] == "2.1"


def test_devices_are_shown_where_the_backends_cannot_be_had(polyattn, add_platform):
    add_platform(probe="Found()", backends="'toy_kernels_nowhere:ALL'")
    toy = by_name(polyattn("info", "--json").json["in_use"], "platform")["toy"]
    assert toy["devices"][0]["arch"] == "toy2"
    assert toy["device_errors"] == []
    assert "toy_kernels_nowhere" in toy["error"]


def test_an_override_still_shows_the_embedded_platform(polyattn, add_platform, monkeypatch):
    add_platform(probe="Found()")
    monkeypatch.setenv("POLYATTN_PLATFORM", "toy")
    pa.reload_environment()
    facts = polyattn("info", "--json").json
    assert [used["platform"] for used in facts["in_use"]] == ["toy", "cpu"]
    assert by_name(facts["platforms"])["cpu"]["status"] == "skipped"


def test_the_machine_of_a_named_device(polyattn, add_platform):
    add_platform(probe="Found(devices=2)")
    machine = polyattn("info", "--machine", "toy:1").json
    assert (machine["platform"], machine["index"], machine["arch"]) == ("toy", 1, "toy2")
    assert json.loads(json.dumps(machine)) == pa.vendor.Machine.from_dict(machine).as_dict()


def test_a_device_whose_facts_cannot_be_read(polyattn, add_platform):
    add_platform(probe="Found()", machine="lambda d: 1 / 0")
    answer = polyattn("info", "--machine", "toy")
    assert answer.code == 2
    assert "the facts of device 'toy' cannot be read: ZeroDivisionError" in answer.err
