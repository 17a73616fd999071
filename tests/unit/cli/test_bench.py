"""`polyattn bench`: backends timed in turns on named shapes, told as a table, JSON, an order file and a picture."""

import importlib.util

import pytest
import torch

from polyattn.bench import plot, timing
from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import HostClock, Timings, clock_of, interleaved
from polyattn.cli import bench as bench_room
from polyattn.reference import reference_attention

CPU = torch.device("cpu")
QUICK = ("bench", "--shapes", "tiny", "--seconds", "0.05")


def test_every_backend_that_takes_the_shape_is_timed(polyattn):
    answer = polyattn(*QUICK, "--json")
    assert answer.code == 0
    tiny = answer.json["shapes"]["tiny"]
    rows = {row["backend"]: row for row in tiny["backends"]}
    assert set(rows) == {"sdpa", "blocked"}
    assert [row["milliseconds"] for row in tiny["backends"]] == sorted(row["milliseconds"] for row in tiny["backends"])
    assert tiny["backends"][0]["ratio"] == 1.0
    for name, row in rows.items():
        assert row["route"] == f"cpu:{name}"
        # a machine so busy that a call took the whole time has one
        assert len(row["rounds"]) == 1 or len(row["rounds"]) >= 3, "the raw numbers are kept"
        assert row["tflops"] == pytest.approx(tiny["flops"] / row["milliseconds"] / 1e9, rel=1e-2)
    assert tiny["flops"] == 4 * 64 * 64 * 2 * 64
    assert answer.json["machine"]["platform"] == "cpu"


def test_the_table_has_bars(polyattn):
    text = polyattn(*QUICK, "--backends", "sdpa").out
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["sdpa"])
    assert row[3:5] == ["1.00", "cpu:sdpa"]
    assert set(row[5]) <= {"█", "#"}
    assert "tiny: 64 tokens, 2 heads, D 64, float32" in text, "the same everywhere, so that nothing is scaled down"
    assert "blocked" not in text


def test_a_processor_says_what_it_scaled_down(polyattn):
    text = polyattn("bench", "--shapes", "flux", "--seconds", "0.05", "--backends", "sdpa").out
    assert "flux: q [1, 576, 4, 64], scaled down from FLUX, 4608 tokens, 24 heads, D 128, float32" in text


def test_help_names_every_shape(polyattn):
    assert " ".join(polyattn("bench", "--help").out.split()).count(f"{', '.join(SHAPES)} (default: all)") == 1


def test_a_backend_that_cannot_or_that_breaks_is_told_and_the_others_are_timed(polyattn, monkeypatch):
    attention = bench_room.try_backends.__globals__["attention"]

    def breaks(*tensors, backend, **rest):
        if backend == "blocked":
            raise RuntimeError("out of memory\nmore text")
        return attention(*tensors, backend=backend, **rest)

    monkeypatch.setitem(bench_room.try_backends.__globals__, "attention", breaks)
    facts = polyattn(*QUICK, "--json").json["shapes"]["tiny"]
    assert [row["backend"] for row in facts["backends"]] == ["sdpa"]
    assert facts["refused"] == {"blocked": "failed: RuntimeError: out of memory"}


def test_a_shape_that_nothing_runs_is_code_1(polyattn):
    answer = polyattn(*QUICK, "--backends", "sdpa", "--dtype", "float8_e4m3fn", "--json")
    assert answer.code == 1
    assert "Float8_e4m3fn" in answer.json["shapes"]["tiny"]["refused"]["all"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shapes", "nonsense"), "--shapes: nonsense not known; there are flux"),
        (("--backends", "abacus"), "--backends: abacus not known; there are sdpa, blocked"),
        (("--dtype", "int8"), "got 'int8'"),
        (("--seconds", "0"), "a number of seconds above 0 is needed, got '0'"),
        (("--seconds", "x"), "got 'x'"),
        (("--write-order", "/no/such/folder/o.json"), "no such folder"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(polyattn, options, said):
    answer = polyattn(*QUICK, *options)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert said in answer.err


def test_the_picture(polyattn, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the extra `bench`")
    path = tmp_path / "bars.png"
    assert polyattn(*QUICK, "--plot", str(path)).code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_refused_before_anything_is_measured(polyattn, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(plot, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setattr(bench_room, "try_backends", lambda *_, **__: pytest.fail("measured"))
    answer = polyattn(*QUICK, "--plot", str(tmp_path / "bars.png"))
    assert answer.code == 2
    assert 'pip install "polyattn[bench]"' in answer.err


@pytest.mark.parametrize("name", SHAPES)
def test_the_work_of_a_shape_is_what_its_structure_shows(name):
    """Visible pairs, counted by the reference: with equal scores a row's LSE is the log of the keys that it sees."""
    work = workload_of(name, CPU, torch.float32, small=True)
    q = torch.zeros_like(work.q)
    _, lse = reference_attention(q, work.k, work.v, structure=work.structure, causal=work.causal, return_lse=True)
    seen = lse.exp().sum().item() / work.q.shape[-2]
    assert work.pairs == round(seen)
    assert work.flops == 4 * work.pairs * work.q.shape[-2] * work.q.shape[-1]


def test_ratios_are_taken_within_rounds():
    timings = Timings({"ours": (1.0, 20.0, 3.0), "theirs": (1.0, 10.0, 1.0)})
    assert timings.ratio("ours", "theirs") == 2.0
    assert timings.median("ours") == 3.0
    assert timings.fastest() == "theirs"


class SteppedClock:
    """A clock on which every call takes its stated time."""

    def __init__(self, milliseconds: dict[str, float]) -> None:
        self.taken = milliseconds
        self.turns: list[str] = []

    def samples(self, call, count, inner, lead_ms):
        if count > 1 or inner > 1 or lead_ms:
            self.turns.append(call())
        return [self.taken[call()]] * count

    def host_ms(self, call):
        return 0.01


def test_candidates_take_turns_and_the_order_turns_too():
    clock = SteppedClock({"a": 1.0, "b": 2.0})
    timings = interleaved({"a": lambda: "a", "b": lambda: "b"}, clock, seconds=0.1, rounds=4)
    assert timings.rounds == {"a": (1.0,) * 4, "b": (2.0,) * 4}
    assert "".join(clock.turns[-8:]) == "abbaabba"


def test_calls_too_long_for_the_time_still_get_three_rounds():
    clock = SteppedClock({"a": 1e4})
    assert len(interleaved({"a": lambda: "a"}, clock, seconds=0.1, rounds=9).rounds["a"]) == 3


def test_a_processors_calls_are_timed_by_the_wall(monkeypatch):
    ticks = iter([0.0, 0.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    assert HostClock().samples(lambda: None, 1, 5, 0.0) == [100.0]
    assert isinstance(clock_of(CPU), HostClock)


class StreamedDevice:
    """Stands for torch's module of a device with events: flushing takes 1 ms, the call 2 ms."""

    def __init__(self):
        self.now = 0.0

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                self.at = device.now

            def elapsed_time(self, other):
                return other.at - self.at

        return Event()

    def synchronize(self):
        pass


def test_a_devices_calls_are_timed_by_events_behind_a_lead(monkeypatch):
    device = StreamedDevice()

    class Cache:
        def zero_(self):
            device.now += 1.0

    def call():
        device.now += 2.0

    monkeypatch.setattr(timing.torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: Cache())
    clock = timing.DeviceClock(torch.device("cpu"))
    before = device.now
    assert clock.samples(call, 2, 4, 3.0) == [2.0, 2.0]
    assert device.now - before == 2 * (3 * 1.0 + 4 * 2.0), "three flushes keep the device busy for the lead"
    assert 0 <= clock.host_ms(call) <= 1.0


def test_bars_are_in_proportion_and_never_empty():
    assert [plot.bar(ratio, width=8) for ratio in (1.0, 2.0, 4.0, 4.1)] == ["#" * 2, "#" * 4, "#" * 8, "#" * 8 + "+"]
    assert plot.bar(1.0, width=1) == "#"
