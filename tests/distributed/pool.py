"""The gloo processes that every test of this folder runs its ranks in: started once a world size, used by all cases.

A case names a function, `"module:function"`, which each of `world` ranks calls as `function(group, *args)`; `group` is
the default group, which has exactly those ranks. Arguments and results are pickled. Processes are forked from a server
that has imported torch, so that a start takes a moment. A world size has processes of its own, because torch names a
group by how many a process has made before: ranks that had met in cases of other sizes would wait for different names.
After a failure its processes are replaced: messages may be left behind in their groups.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.distributed.rank import serve

#: Seconds that a case has, unless it says otherwise: hard, the processes are then killed. Busy machines are slow.
LIMIT = 120.0
#: Seconds for the others to speak once a rank has failed: they may wait for it in a collective, in vain.
_GRACE = 15.0
#: Modules of the server, so that a fork has them.
_PRELOADED = ["torch", "torch.distributed", "polyattn.call", "polyattn.distributed", "tests.distributed.rank"]


class RanksFailed(AssertionError):
    """Ranks raised, died or ran out of time: `reports` says who and how, `results` has what the others returned."""

    def __init__(self, case: str, world: int, results: dict[int, Any], reports: dict[int, str]) -> None:
        self.results, self.reports = results, reports
        told = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(reports.items()))
        super().__init__(f"{case} on {world} ranks; returned: {sorted(results) or 'none'}\n{told}")


class Pool:
    """Ranks for any world size; those of a size start with its first case."""

    def __init__(self) -> None:
        self._crews: dict[int, _Crew] = {}

    def run(self, world: int, case: str, *args: Any, limit: float = LIMIT) -> list[Any]:
        """Each rank's result, in rank order; RanksFailed where a rank raised, died, or did not end within `limit` s."""
        if world not in self._crews:
            self._crews[world] = _Crew(world)
        results: dict[int, Any] = {}
        reports: dict[int, str] = {}
        for rank, returned, value in self._crews[world].answers((case, args), limit):
            (results if returned else reports)[rank] = value
        if reports:
            self._crews.pop(world).end()
            raise RanksFailed(case, world, results, reports)
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        while self._crews:
            self._crews.popitem()[1].end()


class _Crew:
    """The processes of one world size."""

    def __init__(self, world: int) -> None:
        from torch.distributed import TCPStore

        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server inherits it before it imports torch
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        # It lives here, so that it outlives any rank.
        self._store: Any = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._store.port, rank, world), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def answers(self, message: Any, limit: float) -> Iterator[tuple[int, bool, Any]]:
        """(rank, whether it returned, its result or what went wrong), as they come."""
        begun, end = time.monotonic(), time.monotonic() + limit
        told = pickle.dumps(message)
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it died between two cases, which its end of file tells below
                pipe.send_bytes(told)
        silent = dict(enumerate(self._pipes))
        while silent:
            ready = wait(list(silent.values()), max(end - time.monotonic(), 0))
            for rank in [rank for rank, pipe in silent.items() if pipe in ready]:
                returned, value = self._answer(rank)
                del silent[rank]
                if not returned:
                    end = min(end, time.monotonic() + _GRACE)
                yield rank, returned, value
            if not ready:
                waited = time.monotonic() - begun
                yield from ((rank, False, f"no answer within {waited:.0f} s, killed") for rank in silent)
                return

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            returned, value = pickle.loads(self._pipes[rank].recv_bytes())
            return returned, value
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(1)
            return False, f"the process ended with exit code {self._processes[rank].exitcode}"

    def end(self) -> None:
        """Kill the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
