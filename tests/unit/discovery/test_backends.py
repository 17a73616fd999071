"""A platform's backends: lazily imported, checked, extended by third parties under names that are free."""

import random

OWN = "import sys; sys.asked.append('backends of {0}')\nfrom polyattn.vendor import *\n"
BACKEND = (
    "import sys; sys.__dict__.setdefault('asked', []).append('import {1}')\n"
    "from polyattn.vendor import *\n"
    "def backend(): return Backend('{0}', (Slot('m:f'),))\n"
    "RECORD = backend()\n"
)


def toy(sites, attribute):
    sites.add_platform("toy", backends="'toy_kernels:BACKENDS'")
    sites.add("toy-kernels", {"toy_kernels": OWN.format("toy") + attribute})


def test_own_backends_are_imported_at_first_use(sites):
    toy(sites, "BACKENDS = [Backend(n, (Slot('m:f'),)) for n in ('b', 'a')]")
    answer = sites.ask("""
import sys
platform = platform_for("toy")
before = list(sys.asked)
first, second = backends_of(platform), backends_of(platform)
result = [before, [b.name for b in first], first is second, sys.asked, all_backend_names()["toy"]]
""")
    before, names, cached, asked, listed = answer.result
    assert "backends of toy" not in before
    assert asked == [*before, "backends of toy"]
    assert names == listed == ["b", "a"], "the vendor's order is kept"
    assert cached


def test_own_backends_that_do_not_load(sites):
    bad = {
        "raise OSError('libtoy.so')": "OSError: libtoy.so",
        "BACKENDS = (1,)": "not int",
        "BACKENDS = None": "TypeError",
        "BACKENDS = [Backend('x', (Slot('m:f'),))] * 2": "given more than once: x",
        "": "AttributeError",
    }
    for number, attribute in enumerate(bad):
        name = f"toy{number}"
        sites.add_platform(name, device_type=name, priority=number, backends=f"'kernels{number}:BACKENDS'")
        sites.add(f"kernels{number}", {f"kernels{number}": OWN.format(name) + attribute})
    answer = sites.ask("""
import warnings
result = []
for number in range(5):
    try:
        backends_of(platform_for(f"toy{number}"))
    except ImportError as error:
        result.append([type(error).__name__, error.platform, str(error)])
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    names = all_backend_names()
result.append([names, len(told)])
""")
    *errors, (names, told) = answer.result
    for number, (words, (kind, platform, text)) in enumerate(zip(bad.values(), errors, strict=True)):
        assert (kind, platform) == ("BackendUnavailable", f"toy{number}")
        assert words in text
        assert f"kernels{number}:BACKENDS" in text
    assert told == 5
    assert names["toy0"] == []
    assert names["cpu"], "one broken platform hides no other's names"


def third_parties(sites):
    toy(sites, "BACKENDS = (Backend('own', (Slot('m:f'),)),)")
    sites.add_platform("npu", device_type="npu", probe="Declined('none')")
    for distribution, name, backend in (
        ("good", "toy.extra", "extra"),
        ("squat", "toy.own", "own"),
        ("liar", "toy.claimed", "other"),
        ("rival-a", "toy.same", "same"),
        ("rival-b", "toy.same", "same"),
        ("unused", "npu.theirs", "theirs"),
        ("orphan", "nobody.x", "x"),
        ("malformed", "justaname", "justaname"),
    ):
        module = "ext_" + distribution.replace("-", "_")
        sites.add(distribution, {module: BACKEND.format(backend, distribution)}, backends={name: f"{module}:backend"})
    sites.add("plain", {"ext_plain": BACKEND.format("plain", "plain")}, backends={"toy.plain": "ext_plain:RECORD"})
    sites.add("broken", {"ext_broken": "raise OSError('libx.so')"}, backends={"toy.broken": "ext_broken:backend"})


THIRD = """
import sys
names = [b.name for b in backends_of(platform_for("toy"))]
backends_of(platform_for("toy"))
reports = {r.distribution: r.as_dict() for r in backend_reports()}
result = {"names": names, "reports": reports, "asked": sorted(sys.asked), "lines": [str(r) for r in backend_reports()]}
"""


def test_third_party_backends_in_any_order(sites):
    third_parties(sites)
    answers = [sites.ask(THIRD, paths=random.Random(s).sample(sites.paths, len(sites.paths))) for s in range(5)]
    assert answers[0].error is None, answers[0].error["trace"]
    assert len({str((a.result["names"], a.told, a.result["asked"], a.result["lines"])) for a in answers}) == 1
    answer = answers[0]
    assert answer.result["names"] == ["own", "extra", "plain"]
    reports = answer.result["reports"]
    assert {d: r["status"] for d, r in reports.items()} == {
        "good": "accepted", "plain": "accepted", "squat": "failed", "liar": "failed", "broken": "failed",
        "rival-a": "failed", "rival-b": "failed", "malformed": "failed", "unused": "skipped", "orphan": "skipped",
    }  # fmt: skip
    for distribution, words in {
        "squat": "already has a backend 'own'",
        "liar": "its backend 'other'",
        "broken": "OSError: libx.so",
        "rival-a": "rival-a 1.0 and rival-b 1.0",
        "unused": "platform 'npu' is not in use here",
        "malformed": '"<platform>.<backend>"',
    }.items():
        assert words in reports[distribution]["reason"]
    assert "Traceback" in reports["broken"]["traceback"]
    for words in ("'toy.own'", "'toy.claimed'", "'toy.broken'", "'toy.same'", "'justaname'"):
        assert len([text for text in answer.told if words in text]) == 1, (words, answer.told)
    assert len(answer.told) == 5
    imported = {text for text in answer.result["asked"] if text.startswith("import")}
    assert imported == {"import toy", "import npu", "import good", "import liar", "import plain"}
    assert "toy:extra: accepted (good 1.0)" in answer.result["lines"]


def test_the_allow_list_and_strict_apply_to_backends(sites):
    third_parties(sites)
    env = {"POLYATTN_PLUGINS": "toy-attn, good"}
    answer = sites.ask(THIRD, env)
    assert answer.result["names"] == ["own", "extra"]
    assert answer.told == []
    assert answer.result["reports"]["plain"]["status"] == "skipped"
    assert "import plain" not in answer.result["asked"]
    assert sites.ask(THIRD, env | {"POLYATTN_STRICT": "1"}).error is None
    env["POLYATTN_PLUGINS"] += ", broken"
    assert sites.ask(THIRD, env).result["names"] == ["own", "extra"]
    strict = sites.ask(THIRD, env | {"POLYATTN_STRICT": "1"})
    assert "PolyattnWarning" in strict.error["types"]
    assert "libx.so" in strict.error["text"]
