"""Which platform is current and which owns a device type: priorities, POLYATTN_PLATFORM, several at once."""

import random

import pytest

CHOSEN = """
import sys
result = {
    "name": current_platform.name,
    "status": {r.name: r.status for r in platforms()},
    "asked": getattr(sys, "asked", []),
}
"""


def in_ten_orders(sites, code, env=None):
    """The one answer that all orders of the distributions on sys.path give."""
    answers = [
        sites.ask(code, env, random.Random(seed).sample(sites.paths, len(sites.paths))) for seed in range(10)
    ]  # fmt: skip
    told = {str((a.result, a.told, a.error and a.error["text"])) for a in answers}
    assert len(told) == 1, told
    return answers[0]


def two_accelerators(sites):
    sites.add_platform("cuda", device_type="cuda", priority=60)
    sites.add_platform("rocm", device_type="cuda", priority=70)


def test_cpu_never_competes_with_an_accelerator(sites):  # fault row 19 (a)
    sites.add_platform("cuda", device_type="cuda", priority=60)
    answer = in_ten_orders(sites, CHOSEN)
    assert answer.result["name"] == "cuda"
    assert answer.told == []
    assert answer.result["status"] == {"cuda": "accepted", "cpu": "accepted"}


def test_several_accelerators_resolve_by_priority_with_one_warning(sites):  # fault row 19 (b)
    two_accelerators(sites)
    sites.add_platform("npu", device_type="npu", probe="Declined('no device')")
    answer = in_ten_orders(sites, CHOSEN + "[current_platform.name for _ in range(9)]")
    assert answer.result["name"] == "rocm"
    assert len(answer.told) == 1
    for word in ("cuda (priority 60)", "rocm (priority 70)", "POLYATTN_PLATFORM"):
        assert word in answer.told[0]
    assert "npu" not in answer.told[0]


def test_one_built_in_name_from_two_distributions(sites):  # fault row 19 (c)
    sites.add_platform("npu", "polyattn-npu", device_type="npu")
    sites.add_platform("npu", "other-npu", device_type="npu", priority=99)
    answer = in_ten_orders(sites, CHOSEN + "result['priority'] = current_platform.priority")
    assert answer.result["name"] == "npu"
    assert answer.result["priority"] == 50
    assert len(answer.told) == 1
    assert "other-npu" in answer.told[0]
    assert "polyattn-npu" in answer.told[0]


def test_an_override_settles_it(sites):  # fault row 19 (d), row 26's last part
    two_accelerators(sites)
    sites.add_platform("broken", probe="1 / 0")
    answer = in_ten_orders(sites, CHOSEN, {"POLYATTN_PLATFORM": " CUDA\n"})
    assert answer.result["name"] == "cuda"
    assert answer.told == []
    assert answer.result["asked"] == ["import cuda", "probe cuda"], "only that platform is loaded"
    assert answer.result["status"] == {"cuda": "accepted", "cpu": "skipped", "rocm": "skipped", "broken": "skipped"}


def test_an_override_that_is_not_installed_is_fatal(sites):  # fault row 19 (e)
    sites.add_platform("cuda", device_type="cuda")
    answer = in_ten_orders(sites, "current_platform.name", {"POLYATTN_PLATFORM": "npu"})
    assert {"BackendUnavailable", "ImportError", "ValueError"} <= set(answer.error["types"])
    assert answer.error["fields"]["platform"] == "npu"
    for words in (
        "'npu'",
        "polyattn-npu is not installed",
        'pip install "polyattn[npu]"',
        "cpu, cuda",
        "Unset POLYATTN_PLATFORM",
    ):
        assert words in answer.error["text"]


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ("Declined('no /dev/davinci0')", "polyattn-npu 1.0 was not found on this machine: no /dev/davinci0"),
        ("1 / 0", "polyattn-npu 1.0 failed: ZeroDivisionError"),
    ],
)
def test_an_override_that_is_not_usable_is_fatal_at_every_use(sites, probe, words):
    sites.add_platform("npu", device_type="npu", probe=probe)
    code = """
import warnings; warnings.simplefilter("ignore")
result = []
uses = (current_platform.is_npu, all_backend_names, lambda: current_platform.name, lambda: platform_for("cpu"))
for use in uses * 2:
    try:
        result.append(["no error", str(use())])
    except ImportError as error:
        result.append([type(error).__name__, str(error)])
print(repr(current_platform))
result.append([r.status for r in platforms() if r.name == "npu"])
"""
    *uses, status = sites.ask(code, {"POLYATTN_PLATFORM": "npu"}).result
    assert len(uses) == 8
    for kind, text in uses:
        assert kind == "BackendUnavailable"
        assert words in text
        assert "Unset POLYATTN_PLATFORM" in text
    assert status in (["declined"], ["failed"]), "the report stays readable"


@pytest.mark.parametrize("text", ["CUDAA", "gpu", "cpu,cuda", "toy-attn"])
def test_a_name_that_nobody_has(sites, text):  # fault row 17
    sites.add_platform("toy")
    sites.add_platform("xpu", "squatter")
    error = sites.ask("current_platform.name", {"POLYATTN_PLATFORM": text}).error
    assert "ValueError" in error["types"]
    assert "BackendUnavailable" not in error["types"]
    for words in (f"POLYATTN_PLATFORM={text!r}", "Valid names: cpu, toy;", "Unset POLYATTN_PLATFORM"):
        assert words in error["text"]
    assert "squatter" not in error["text"]


@pytest.mark.parametrize("text", ["", "   ", "\t"])
def test_blank_is_unset(sites, text):  # fault row 17
    sites.add_platform("toy")
    assert sites.ask(CHOSEN, {"POLYATTN_PLATFORM": text}).result["name"] == "toy"


def test_reading_the_environment_again(sites):  # fault row 17: changed after first use
    sites.add_platform("toy")
    answer = sites.ask("""
import os, sys
from polyattn.environment import reload_environment
kept = current_platform
result = [kept.name]
os.environ["POLYATTN_PLATFORM"] = "cpu"
result.append(kept.name)
reload_environment()
result.append(kept.name)
del os.environ["POLYATTN_PLATFORM"]
reload_environment()
result.append(kept.name)
result.append(sys.asked.count("probe toy"))
""")
    assert answer.result == ["toy", "toy", "cpu", "toy", 2]


def test_owners_of_device_types(sites):
    two_accelerators(sites)
    sites.add_platform("aaa", device_type="shared", priority=5)
    sites.add_platform("bbb", device_type="shared", priority=5)
    sites.add_platform("slower", device_type="cpu", priority=-1)
    sites.add_platform("also", device_type="cpu", priority=0)
    ask = "result = [getattr(platform_for(t), 'name', None) for t in ('cpu', 'cuda', 'shared', 'mps', 'meta')]"
    answer = in_ten_orders(sites, ask)
    assert answer.result == ["cpu", "rocm", "aaa", None, None], "ties go to the embedded platform, then by name"
    sites.add_platform("avx", device_type="cpu", priority=1)
    assert sites.ask(ask).result[0] == "avx"
    forced = sites.ask(ask + "; result.append(current_platform.name)", {"POLYATTN_PLATFORM": "cuda"})
    assert forced.result == ["cpu", "cuda", None, None, None, "cuda"], "cpu tensors keep the embedded platform"


def test_strict_makes_each_use_raise_and_leaves_the_report(sites):
    two_accelerators(sites)
    sites.add_platform("broken", probe="1 / 0")
    code = """
from polyattn.environment import PolyattnWarning
result = [len(platforms())]
for use in (lambda: current_platform.name, lambda: platform_for("cuda")) * 2:
    try:
        use()
    except PolyattnWarning as error:
        result.append(str(error))
"""
    answer = sites.ask(code, {"POLYATTN_STRICT": "1"})
    assert answer.warnings == []
    assert len(answer.result) == 5
    assert answer.result[0] == 4
    for text in answer.result[1:]:
        assert "several accelerator" in text
        assert "ZeroDivisionError" in text
        assert "POLYATTN_STRICT=1" in text
    bad = sites.ask("current_platform.name", {"POLYATTN_STRICT": "maybe"})
    assert "ValueError" in bad.error["types"]
    assert "POLYATTN_STRICT='maybe'" in bad.error["text"]
