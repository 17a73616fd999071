"""Runs sections: each in processes of its own under a time budget, logged, remembered, told in a table at the end.

A section's command ends with 0 (good), 1 (it ran to its end and something is wrong), 3 (its time was up) or anything
else (it crashed). Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

#: What a command's end is called; the worst of a section's parts is the section's.
CODES = {0: "ok", 1: "failed", 3: "unfinished"}
WORST_FIRST = ("crashed", "timeout", "not started", "unfinished", "failed", "ok")
DONE = ("ok", "failed")

#: Less than this is not worth starting with; and a command that stops by itself gets the margin to do so.
_LEAST_SECONDS = 5.0
_MARGIN_SECONDS = 10.0
_LAST_LINES = 12


@dataclass(frozen=True)
class Section:
    """A named piece of work.

    name      "bench:dense"
    seconds   the budget of each part
    parts     command lines, run beside each other; in them "{out}" is the folder of results, "{until}" when its
              time is up, "{started}" when the section started (seconds since the epoch)
    alone     it measures time, so that nothing may run beside it
    restarts  how often a part that crashed is started again within its budget: it goes on where it was
    records   patterns of the files under "{out}" that it leaves
    """

    name: str
    seconds: float
    parts: tuple[tuple[str, ...], ...]
    alone: bool = False
    restarts: int = 0
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a section or a part of one went: status, seconds, and its last line."""

    status: str
    seconds: float
    told: str = ""


class State:
    """Which sections have ended how, in one JSON file of the results' folder."""

    def __init__(self, out: Path) -> None:
        self._path = out / "state.json"
        self._lock = Lock()
        self.ended: dict[str, Ended] = {}
        if self._path.exists():
            self.ended = {name: Ended(**facts) for name, facts in json.loads(self._path.read_text()).items()}

    def done(self, name: str) -> bool:
        """Whether the section ran to its end."""
        return name in self.ended and self.ended[name].status in DONE

    def keep(self, name: str, ended: Ended) -> None:
        """Remember it, at once, so that an interruption loses nothing."""
        with self._lock:
            self.ended[name] = ended
            self._write()

    def forget(self, name: str) -> None:
        """As if it had never run."""
        with self._lock:
            self.ended.pop(name, None)
            self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps({name: vars(ended) for name, ended in self.ended.items()}, indent=2) + "\n")
        beside.replace(self._path)


def run_sections(
    sections: Sequence[Section], out: Path, *, jobs: int, seconds: float, cwd: Path, again: bool = False
) -> dict[str, Ended]:
    """Run those that are not done; how all of these went, those done before included.

    The sections that may share the machine come first, `jobs` processes at a time; then the others, one by one. After
    `seconds` nothing is started, and what runs is stopped.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "logs").mkdir(exist_ok=True)
    state = State(out)
    deadline = time.monotonic() + seconds
    if again:
        for section in sections:
            _clear(section, state, out)
    due = [section for section in sections if not state.done(section.name)]
    for section in sections:
        if section not in due:
            print(f"-- {section.name}: {state.ended[section.name].status} before, not run again", flush=True)
    together = [section for section in due if not section.alone]
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        started = {section.name: _Run(section, out, cwd, deadline) for section in together}
        waiting = [
            (section, [pool.submit(started[section.name].part, number) for number in range(len(section.parts))])
            for section in together
        ]
        for section, futures in waiting:
            _finish(section, [future.result() for future in futures], state)
    for section in due:
        if section.alone:
            one = _Run(section, out, cwd, deadline)
            _finish(section, [one.part(number) for number in range(len(section.parts))], state)
    return {section.name: state.ended[section.name] for section in sections}


class _Run:
    """One section being run."""

    def __init__(self, section: Section, out: Path, cwd: Path, deadline: float) -> None:
        self._section, self._out, self._cwd, self._deadline = section, out, cwd, deadline
        self._started = time.time()

    def part(self, number: int) -> Ended:
        """Run one part, again where it crashed and may go on."""
        section, begun = self._section, time.monotonic()
        end = min(begun + section.seconds, self._deadline)
        log = self._out / "logs" / f"{section.name.replace(':', '_')}.{number}.log"
        log.unlink(missing_ok=True)
        status = "not started"
        for _ in range(section.restarts + 1):
            left = end - time.monotonic()
            if left < _LEAST_SECONDS:
                break
            status = self._once(section.parts[number], log, left)
            if status != "crashed":
                break
        ended = Ended(status, round(time.monotonic() - begun, 1), _last(log, 1))
        shown = _last(log, _LAST_LINES) if status not in ("ok", "unfinished") else ended.told
        of = f" part {number + 1} of {len(section.parts)}" if len(section.parts) > 1 else ""
        print(f"== {section.name}{of}: {status} after {ended.seconds:.0f} s\n{shown}", flush=True)
        return ended

    def _once(self, command: Sequence[str], log: Path, left: float) -> str:
        until = time.time() + left - min(_MARGIN_SECONDS, left / 4)
        given = {"out": str(self._out), "until": f"{until:.1f}", "started": f"{self._started}"}
        line = [word.format(**given) for word in command]
        with log.open("ab") as file:
            file.write(f"$ {' '.join(line)}\n".encode())
            file.flush()
            process = subprocess.Popen(
                line, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                _end(process)
        return CODES.get(code, "crashed")


def summary(ended: dict[str, Ended]) -> str:
    """A table of how the sections went."""
    width = max(map(len, ended), default=0)
    rows = (f"{name:<{width}}  {one.status:<11}  {one.seconds:6.0f} s  {one.told}"[:200] for name, one in ended.items())
    return "\n".join(rows)


def _finish(section: Section, parts: Sequence[Ended], state: State) -> None:
    worst = min(parts, key=lambda part: WORST_FIRST.index(part.status))
    state.keep(section.name, Ended(worst.status, max(part.seconds for part in parts), worst.told))


def _clear(section: Section, state: State, out: Path) -> None:
    state.forget(section.name)
    for pattern in section.records:
        for path in out.glob(pattern):
            path.unlink()


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started; they share a group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last(log: Path, lines: int) -> str:
    if not log.exists():
        return ""
    with log.open(errors="replace") as file:
        return "\n".join(line.rstrip() for line in deque((line for line in file if line.strip()), lines))
