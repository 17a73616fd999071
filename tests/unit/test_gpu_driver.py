"""The GPU driver: sections in processes of their own, budgets, resuming, and no unfinished run that counts as ok."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from scripts import gpu_conformance
from scripts.gpu_collect import collect, conformance, pytest_outcome
from scripts.gpu_running import Section, run_sections, summary

ROOT = Path(__file__).resolve().parents[2]


def section(name: str, *codes: str, seconds: float = 30.0, **facts) -> Section:
    return Section(name, seconds, tuple((sys.executable, "-c", code) for code in codes), **facts)


def run(out: Path, *sections: Section, seconds: float = 60.0, jobs: int = 2, again: bool = False) -> dict[str, str]:
    ended = run_sections(sections, out, jobs=jobs, seconds=seconds, cwd=ROOT, again=again)
    return {name: one.status for name, one in ended.items()}


def test_the_end_of_a_process_is_the_sections_status_and_the_worst_part_counts(tmp_path):
    told = run(
        tmp_path,
        section("good", "print('fine')"),
        section("wrong", "raise SystemExit(1)"),
        section("late", "raise SystemExit(3)"),
        section("dead", "import os; os.abort()"),
        section("mixed", "print(1)", "raise SystemExit(3)", "raise SystemExit(1)"),
    )
    assert told == {"good": "ok", "wrong": "failed", "late": "unfinished", "dead": "crashed", "mixed": "unfinished"}


def test_a_hang_costs_its_budget_and_takes_its_children_along(tmp_path):
    beats = tmp_path / "beats"
    child = f"import time\nwhile True: open({str(beats)!r}, 'a').write('x'); time.sleep(.05)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = time.monotonic()
    assert run(tmp_path, section("hangs", code, seconds=6.0), section("next", "")) == {"hangs": "timeout", "next": "ok"}
    assert time.monotonic() - started < 20
    before = beats.stat().st_size
    time.sleep(0.5)
    assert beats.stat().st_size == before > 0, "the child is gone too"


def test_what_is_done_is_not_run_again_and_what_is_not_is(tmp_path):
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); raise SystemExit(CODE)"
    for code, runs in ((0, 1), (1, 1), (3, 2)):
        (tmp_path / "runs").write_text("")
        once = section(f"ends with {code}", count.replace("CODE", str(code)), records=("left.*",))
        run(tmp_path, once)
        run(tmp_path, once)
        assert len((tmp_path / "runs").read_text()) == runs
    (tmp_path / "left.json").write_text("")
    run(tmp_path, once, again=True)
    assert len((tmp_path / "runs").read_text()) == 3
    assert not (tmp_path / "left.json").exists(), "its records are forgotten too"


def test_after_the_runs_time_nothing_starts(tmp_path):
    assert run(tmp_path, section("late", "print(1)"), seconds=1.0) == {"late": "not started"}


def test_a_part_that_crashed_goes_on_where_it_may(tmp_path):
    code = f"""
import os, pathlib
tries = pathlib.Path({str(tmp_path / "tries")!r})
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
raise SystemExit(0 if len(tries.read_text()) == 3 else 4)
"""
    assert run(tmp_path, section("resumes", code, restarts=5)) == {"resumes": "ok"}
    (tmp_path / "tries").unlink()
    assert run(tmp_path, section("once", code)) == {"once": "crashed"}


def test_sections_that_time_run_alone_after_the_others(tmp_path):
    log = str(tmp_path / "order")
    code = f"import time; f = open({log!r}, 'a'); f.write('<NAME '); f.flush(); time.sleep(.5); f.write('NAME> ')"
    run(
        tmp_path,
        section("timing", code.replace("NAME", "t"), code.replace("NAME", "u"), alone=True),
        section("beside", code.replace("NAME", "b")),
        jobs=4,
    )
    assert (tmp_path / "order").read_text().split() == ["<b", "b>", "<t", "t>", "<u", "u>"]


def test_commands_learn_the_folder_and_their_time(tmp_path):
    code = (
        "import sys, time; out, until, started = sys.argv[1:]; print(out, float(until) > time.time() >= float(started))"
    )
    given = Section("given", 30.0, ((sys.executable, "-c", code, "{out}", "{until}", "{started}"),))
    ended = run_sections([given], tmp_path, jobs=1, seconds=60, cwd=ROOT)
    assert ended["given"].told == f"{tmp_path} True"
    assert "given" in summary(ended)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_the_sections_are_listed_and_chosen_by_name(platform):
    def gpu(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/gpu.py", "list", "--platform", platform, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    names = [line.split()[0] for line in gpu().stdout.splitlines()]
    benchmarks = {f"bench:{path.stem}" for path in (ROOT / "benchmarks" / "cuda").glob("[a-z]*.py")} - {"bench:facts"}
    assert {"facts", "pytest", "conformance:sdpa"} | benchmarks <= set(names)
    assert ("kernels" in names) == (platform != "cpu"), "a processor could not run them natively"
    only = gpu("--only", "bench,facts", "--skip", "bench:dense").stdout.splitlines()
    assert {line.split()[0] for line in only} == {"facts", *benchmarks} - {"bench:dense"}
    wrong = gpu("--only", "nonsense")
    assert wrong.returncode == 2
    assert "no section nonsense" in wrong.stderr


@pytest.fixture
def sections_of(monkeypatch):
    """Imported as the driver does: its files find each other in their own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("gpu_sections").sections_of


def test_the_kernels_tests_are_a_part_each_file(sections_of):
    (kernels,) = (one for one in sections_of("cuda", shards=1, small=False, root=ROOT) if one.name == "kernels")
    stems = {path.stem for path in (ROOT / "tests" / "kernels").glob("test_*.py")} - {"test_compiles_offline"}
    files = {str(ROOT / "tests" / "kernels" / f"{stem}.py"): f"--junitxml={{out}}/kernels/{stem}.xml" for stem in stems}
    assert {command[-2]: command[-1] for command in kernels.parts} == files
    assert kernels.records == ("kernels/*.xml",)


def test_a_benchmark_without_a_script_is_an_error(sections_of, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"benchmarks/cuda/dense\.py"):
        sections_of("cuda", shards=1, small=False, root=tmp_path)


def test_help_says_what_each_command_does():
    told = subprocess.run([sys.executable, "scripts/gpu.py", "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = {words[0]: words[1:] for line in told.splitlines() if line.startswith("    ") and (words := line.split())}
    assert all(lines[command] for command in ("run", "list", "collect"))


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Runs a part of cpu:sdpa's cases of block maps, the fewest there are, in this process; its exit code."""

    def work(*words: str) -> int:
        command = ["gpu_conformance.py", "cpu:sdpa", "--records", str(tmp_path), "--structures", "block_map", *words]
        monkeypatch.setattr(sys, "argv", command)
        return gpu_conformance.main()

    return work


def test_cases_are_kept_and_not_run_again(tmp_path, worker, capsys):
    assert worker("--seconds", "0") == gpu_conformance.UNFINISHED
    assert "0 of" in capsys.readouterr().out
    assert worker("--part", "0/2") == gpu_conformance.OK
    (half,) = conformance(tmp_path)
    assert (half["ok"], 0 < half["ran"] < half["planned"]) == (False, True), "half of it is not ok"
    assert worker("--part", "1/2") == gpu_conformance.OK
    (whole,) = conformance(tmp_path)
    assert (whole["ok"], whole["ran"], whole["failures"]) == (True, whole["planned"], [])
    size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    assert worker("--part", "0/2", "--seconds", "0") == gpu_conformance.OK, "nothing was left to do"
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) < size + 400


def test_a_case_that_never_ended_has_failed_and_is_tried_again_only_by_the_next_run(tmp_path, worker, monkeypatch):
    assert worker() == gpu_conformance.OK
    path = next(tmp_path.glob("*.jsonl"))
    label = json.loads(path.read_text().splitlines()[1])["case"]
    began = time.time()
    with path.open("a") as file:
        file.write(json.dumps({"case": label, "at": began}) + "\n" + '{"case": "cut off')
    (report,) = conformance(tmp_path)
    assert not report["ok"]
    assert report["failures"] == [{"case": label, "problems": ["began and did not end"]}]
    assert worker("--since", str(began - 1)) == gpu_conformance.FAILED
    path.write_text(path.read_text() + "\n")
    assert worker("--since", str(began + 1)) == gpu_conformance.OK


def test_a_failure_is_told_by_name(tmp_path, worker, monkeypatch, capsys):
    wrong = gpu_conformance.Outcome("native", ("it is off by one",))
    monkeypatch.setattr(gpu_conformance, "check", lambda *_: wrong)
    assert worker() == gpu_conformance.FAILED
    assert "it is off by one" in capsys.readouterr().out
    monkeypatch.setattr(gpu_conformance, "is_lost", lambda _: True)
    assert worker() == gpu_conformance.LOST, "the rest needs a new process"
    (report,) = conformance(tmp_path)
    assert not report["ok"]


def test_results_are_collected_under_the_devices_name(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    machine = {"device": "NVIDIA H200", "driver": "580"}
    (out / "facts.json").write_text(json.dumps({"machine": machine}))
    (out / "state.json").write_text(json.dumps({name: {"status": "ok"} for name in ("pytest", "kernels")}))
    (out / "dense.json").write_text(json.dumps({"question": "how fast?", "machine": machine}))
    (out / "pytest").mkdir()
    (out / "pytest" / "test_one.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"><failure/></testcase>'
        '<testcase classname="a" name="c"/></testsuite></testsuites>'
    )
    (out / "kernels").mkdir()
    (out / "kernels" / "test_two.xml").write_text('<testsuite><testcase classname="k" name="d"/></testsuite>')
    names = {"dense_h200.json", "pytest_h200.json", "kernels_h200.json"}
    assert {path.name for path in collect(out, results)} == names
    told = json.loads((results / "pytest_h200.json").read_text())
    assert (told["ok"], told["passed"], told["failed"], told["machine"]) == (False, 1, ["a::b"], machine)
    told = json.loads((results / "kernels_h200.json").read_text())
    assert (told["ok"], told["passed"], told["machine"]) == (True, 1, machine)


def test_backends_that_did_not_run_this_time_stay_in_the_record_with_their_machine(tmp_path):
    results = tmp_path / "results"
    for day, backend in (("1", "fa3"), ("2", "flex"), ("3", "fa3")):
        out = tmp_path / day
        (out / "conformance").mkdir(parents=True)
        machine = {"device": "NVIDIA H200", "date": day}
        (out / "facts.json").write_text(json.dumps({"machine": machine}))
        lines = [{"at": 1, "planned": 1}, {"at": 2, "case": "dense/a", "problems": [], "route": "native"}]
        text = "\n".join(map(json.dumps, lines))
        (out / "conformance" / f"cuda_{backend}.0.jsonl").write_text(text)
        collect(out, results)
    told = json.loads((results / "conformance_h200.json").read_text())
    assert [(b["backend"], b["machine"]["date"]) for b in told["backends"]] == [("cuda:fa3", "3"), ("cuda:flex", "2")]
    assert told["ok"]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("AMD Instinct MI300X", "amd-instinct-mi300x"),
    ],
)
def test_a_record_has_the_whole_name_of_the_device(tmp_path, device, name):
    (tmp_path / "dense.json").write_text(json.dumps({"machine": {"device": device}}))
    assert [path.name for path in collect(tmp_path, tmp_path / "results")] == [f"dense_{name}.json"]


def test_tests_that_were_all_skipped_are_not_ok(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuite><testcase classname="a" name="b"><skipped message="no GPU"/></testcase></testsuite>')
    told = pytest_outcome([report])
    assert (told["ok"], told["passed"], told["skipped_because"]) == (False, 0, {"no GPU": 1})
