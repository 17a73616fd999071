"""Who may have a name: built-in names, clashes, duplicates, the allow-list. Decided before anything is imported."""

import random

SEEN = """
import sys
result = {"reports": [r.as_dict() for r in platforms()], "name": current_platform.name}
result["asked"] = getattr(sys, "asked", [])
"""


def by_distribution(answer):
    return {report["distribution"]: report for report in answer.result["reports"]}


def test_built_in_names_belong_to_their_distributions(sites):
    sites.add_platform("cuda", "fast-cuda", device_type="cuda", priority=900)
    sites.add_platform("cpu", "better-cpu", device_type="cpu", priority=900)
    sites.add_platform("npu", "Polyattn.NPU", device_type="npu", priority=40)  # PEP 503: the real owner
    answer = sites.ask(SEEN)
    reports = by_distribution(answer)
    for distribution, name, owner in (("fast-cuda", "cuda", "polyattn-cuda"), ("better-cpu", "cpu", "polyattn")):
        report = reports[distribution]
        assert report["status"] == "failed"
        assert f"only distribution {owner} may register it" in report["reason"]
        told = [text for text in answer.told if distribution in text]
        assert len(told) == 1
        assert repr(name) in told[0]
        assert "1.0" in told[0]
    assert reports["Polyattn.NPU"]["status"] == reports["polyattn"]["status"] == "accepted"
    assert answer.result["name"] == "npu"
    assert answer.result["asked"] == ["import npu", "probe npu"], "squatters are never imported"


def test_names_that_no_choice_could_spell(sites):
    sites.add("loud-attn", {"toy_loud": "raise OSError"}, {"Loud": "toy_loud:platform", "a.b": "toy_loud:platform"})
    answer = sites.ask(SEEN)
    failed = [r for r in answer.result["reports"] if r["status"] == "failed"]
    assert sorted(r["name"] for r in failed) == ["Loud", "a.b"]
    assert all("lower case letters" in r["reason"] for r in failed)


def test_two_distributions_with_one_name_clash_in_any_order(sites):
    sites.add_platform("foo", "foo-one", priority=80)
    sites.add_platform("foo", "foo-two", priority=90)
    sites.add_platform("toy", priority=10)
    seen = set()
    for seed in range(10):
        paths = random.Random(seed).sample(sites.paths, len(sites.paths))
        answer = sites.ask(SEEN, paths=paths)
        assert len(answer.told) == 1
        reports = by_distribution(answer)
        assert reports["foo-one"]["status"] == reports["foo-two"]["status"] == "failed"
        assert answer.result["name"] == "toy"
        assert "import foo" not in answer.result["asked"]
        seen.add((answer.told[0], str([(r["name"], r["reason"]) for r in answer.result["reports"]])))
    assert len(seen) == 1
    (told, _), *_ = seen
    assert "foo-one 1.0 and foo-two 1.0" in told
    assert "POLYATTN_PLUGINS" in told
    asked_for = sites.ask("current_platform.name", {"POLYATTN_PLATFORM": "foo"})
    assert asked_for.error["types"][0] == "BackendUnavailable"
    assert "foo-one 1.0 and foo-two 1.0" in asked_for.error["text"]
    settled = sites.ask(SEEN, {"POLYATTN_PLUGINS": "Foo_Two"})
    assert settled.result["name"] == "foo"
    assert settled.told == []


def test_one_distribution_seen_twice_counts_once(sites):
    for distribution in ("twice-attn", "Twice_Attn", "twice.attn"):
        sites.add_platform("twice", distribution)
    for _ in range(2):
        answer = sites.ask(SEEN)
        assert [r["distribution"] for r in answer.result["reports"] if r["name"] == "twice"] == ["twice-attn"]
        assert answer.told == []
        assert answer.result["asked"] == ["import twice", "probe twice"]
        sites.add("unrelated", entry_points="[console_scripts]\nno equals sign\n")  # importlib.metadata then gives up


def test_the_allow_list_keeps_strangers_out(sites):
    sites.add_platform("cuda", device_type="cuda", priority=90)
    sites.add_platform("one", "First__Attn", priority=20)
    sites.add_platform("two", "second-attn", priority=30)
    sites.add_platform("npu", "npu-squatter")
    for text, status in {
        "first.attn": "accepted",
        " FIRST-attn , ,polyattn": "accepted",
        "polyattn": "skipped",
    }.items():
        answer = sites.ask(SEEN, {"POLYATTN_PLUGINS": text, "POLYATTN_PLATFORM": " "})
        reports = by_distribution(answer)
        assert reports["First__Attn"]["status"] == status
        assert reports["second-attn"]["status"] == reports["npu-squatter"]["status"] == "skipped"
        assert "second-attn is not in POLYATTN_PLUGINS=" in reports["second-attn"]["reason"]
        assert repr(text) in reports["second-attn"]["reason"]
        assert reports["polyattn-cuda"]["status"] == "accepted", "ours are always allowed"
        assert "import two" not in answer.result["asked"]
        assert "import npu" not in answer.result["asked"]
    everyone = sites.ask(SEEN, {"POLYATTN_PLUGINS": "  "})
    assert by_distribution(everyone)["second-attn"]["status"] == "accepted", "blank is unset"
    refused = sites.ask("current_platform.name", {"POLYATTN_PLUGINS": "polyattn", "POLYATTN_PLATFORM": "two"})
    assert refused.error["types"][0] == "BackendUnavailable"
    assert "second-attn 1.0 is left out by POLYATTN_PLUGINS" in refused.error["text"]
