"""Ranks agree that they make the same call before they communicate: through their group's store, not by a collective.

A collective on different shapes hangs or mixes bytes up; this cannot. On first use of a signature each rank publishes
it under the number of first uses so far. The last one to come compares all of them and writes the verdict, which
every rank reads: agreed, or what differs. A rank that has waited for too long writes the verdict itself and names who
is missing. A verdict is written once, so all ranks have the same answer; that of agreed signatures is remembered, and
a later call is one look-up. At most three numbers have keys in the store at a time, unless ranks are missing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from polyattn.distributed.disagreement import Told, difference, rank_names
from polyattn.distributed.failure import PeerLost
from polyattn.errors import UnsupportedRequest
from polyattn.structures.base import keep

#: Field -> value, whose text is the same on every rank exactly if the value is; or "refused: why", for a call that this
#: rank does not make.
Signature = Mapping[str, Hashable] | str
#: What a rank tells the others beside it, such as its numbers of rows.
Facts = tuple[int | str, ...]

#: Signatures that a group remembers, the oldest dropped first: in the same order on every rank.
_LIMIT = 4096
#: Seconds between two looks at the store, growing; the waiting is polled, because a store that is asked to wait serves
#: no other thread of this process meanwhile.
_SHORTEST, _LONGEST = 0.0005, 0.02
_PREFIX = "polyattn"


def agree(
    group: dist.ProcessGroup, signature: Signature, facts: Facts = (), timeout: float | None = None
) -> tuple[Facts, ...]:
    """Every rank's facts, in rank order, once all ranks of `group` have come with the same signature.

    All ranks call this in the same order. `facts` belong to the signature: they are told on its first use. `timeout`:
    seconds until a missing rank is an error; None: as long as the group's collectives wait. A rank that refuses waits
    for nobody and gets (): the others hear what it says when they come.

    Raises:
        UnsupportedRequest: the ranks came with different signatures; it names fields, values and ranks. Or one refused.
        PeerLost: a rank did not come in time; it names the rank.
    """
    if isinstance(signature, str):
        _book_of(group).refuse(signature)
        return ()
    key = tuple(signature.items())
    book = _books.get(group)
    known = None if book is None else book.agreed.get(key)
    if known is None:
        book = _book_of(group)
        known = book.settled(key, signature, facts, _patience(group) if timeout is None else timeout)
    assert book is not None
    if known[book.rank] != facts:
        raise ValueError(f"facts: rank {book.rank} told {known[book.rank]} with this signature before, now {facts}")
    return known


def waiting(group: dist.ProcessGroup) -> str:
    """What ranks wait with whose call this one does not make, or ""; asked when a collective has failed, by the store.

    A call that was agreed upon long ago goes straight to its collective: the ranks that make it learn only when that
    fails that another one makes a new call.
    """
    book = _books.get(group)
    try:
        return "" if book is None else book.others()
    except RuntimeError:  # whoever holds the store has ended
        return ""


@dataclass(eq=False)
class _Book:
    """What the ranks of one group have agreed upon, as one of them knows it.

    number  first uses and refusals so far
    stale   numbers whose keys are still in the store
    """

    store: Store
    ranks: list[int]
    rank: int
    agreed: dict[Any, tuple[Facts, ...]] = field(default_factory=dict)
    number: int = 0
    stale: list[int] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def settled(self, key: Any, signature: Mapping[str, Hashable], facts: Facts, timeout: float) -> tuple[Facts, ...]:
        """Every rank's facts: asked for, unless another thread has done so meanwhile."""
        with self.lock:
            if key not in self.agreed:
                keep(self.agreed, _LIMIT, key, self._ask(signature, facts, timeout))
            return self.agreed[key]

    def refuse(self, said: str) -> None:
        """Publish a refusal under the next number, with the verdict that follows from it."""
        with self.lock, self._reaching():
            number, _ = self._publish(said, ())
            self._judge(number, self._problem([said if rank == self.rank else {} for rank in range(len(self.ranks))]))

    def _ask(self, signature: Mapping[str, Hashable], facts: Facts, timeout: float) -> tuple[Facts, ...]:
        """One exchange by the store, under the next number."""
        with self._reaching():
            number, last = self._publish({name: str(value) for name, value in signature.items()}, facts)
            if last:
                self._judge(number, self._verdict(number))
            elif not self._comes(f"{number}/verdict", timeout):
                self._judge(number, self._missing(number, timeout))
            verdict = json.loads(self.store.get(f"{number}/verdict"))
        if "facts" not in verdict:
            refuse = PeerLost if "missing" in verdict else UnsupportedRequest
            raise refuse(f"{verdict['problem']}{self._whose()}")
        return tuple(map(tuple, verdict["facts"]))

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"parallel: rank {self.rank} cannot reach the store of its group{self._whose()}; the process that "
                "holds it has ended, or the network is down"
            ) from error

    def _publish(self, told: Told, facts: Facts) -> tuple[int, bool]:
        """The number that it is published under, and whether all others have come to it before."""
        self._clear()
        number = self.number
        self.number += 1
        self.stale.append(number)
        self.store.set(f"{number}/{self.rank}", json.dumps([told, facts]))
        return number, self.store.add(f"{number}/came", 1) == len(self.ranks)

    def others(self) -> str:
        """The calls that other ranks have published under the number that this one has not come to."""
        told = []
        for rank in range(len(self.ranks)):
            if self.store.check([f"{self.number}/{rank}"]):
                signature, _ = json.loads(self.store.get(f"{self.number}/{rank}"))
                does = signature if isinstance(signature, str) else f"waits with another call: {_as_text(signature)}"
                told.append(f"{rank_names([rank])} {does}")
        return "; ".join(told)

    def _judge(self, number: int, verdict: dict[str, Any]) -> None:
        """The first verdict stands."""
        self.store.compare_set(f"{number}/verdict", "", json.dumps(verdict))

    def _verdict(self, number: int) -> dict[str, Any]:
        published = [json.loads(self.store.get(f"{number}/{rank}")) for rank in range(len(self.ranks))]
        told = [told for told, _ in published]
        return self._problem(told) if difference(told) else {"facts": [facts for _, facts in published]}

    def _problem(self, told: Sequence[Told]) -> dict[str, Any]:
        return {"problem": f"parallel: the ranks do not make the same call. {difference(told)}"}

    def _missing(self, number: int, waited: float) -> dict[str, Any]:
        absent = [rank for rank in range(len(self.ranks)) if not self.store.check([f"{number}/{rank}"])]
        if not absent:  # the last one ended before it could judge
            return self._verdict(number)
        told, _ = json.loads(self.store.get(f"{number}/{self.rank}"))
        problem = (
            f"parallel: {rank_names(absent)} of {len(self.ranks)} did not come to a call within {waited:g} s; rank "
            f"{self.rank} waited with: {_as_text(told)}"
        )
        return {"missing": absent, "problem": problem}

    def _comes(self, key: str, timeout: float) -> bool:
        end, pause = time.monotonic() + timeout, _SHORTEST
        while not self.store.check([key]):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return True

    def _clear(self) -> None:
        """Delete what nobody will read again: once all ranks have come to a number, they are done with those before."""
        if not self.stale or self.store.add(f"{self.stale[-1]}/came", 0) < len(self.ranks):
            return
        for old in self.stale[:-1]:
            for key in (f"{old}/{self.rank}", *((f"{old}/came", f"{old}/verdict") if self.rank == 0 else ())):
                with contextlib.suppress(NotImplementedError):  # a store that cannot delete: keys stay
                    self.store.delete_key(key)
        del self.stale[:-1]

    def _whose(self) -> str:
        """Which ranks are meant, where the group's numbers are not the global ones."""
        if self.ranks == list(range(len(self.ranks))):
            return ""
        return f" (numbers within the group of global {rank_names(self.ranks)})"


def _as_text(told: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in told.items())


_books: WeakKeyDictionary[dist.ProcessGroup, _Book] = WeakKeyDictionary()


def _book_of(group: dist.ProcessGroup) -> _Book:
    if group not in _books:
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        store = PrefixStore(_PREFIX, _store_of(group))
        # The same store may serve groups one after the other; each has prefixes of its own.
        life = store.add(f"lives/{rank}", 1)
        _books[group] = _Book(PrefixStore(str(life), store), ranks, rank)
    return _books[group]


def _store_of(group: dist.ProcessGroup) -> Store:
    """The group's own store, which no other group writes to."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    store: Store = dist.distributed_c10d._get_process_group_store(group)  # torch 2.6 has no public way
    return store


def _patience(group: dist.ProcessGroup) -> float:
    """Seconds that the group's collectives wait, where its backend tells; else torch's default for most of them."""
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError):
            wait: timedelta = group._get_backend(device).options._timeout
            return wait.total_seconds()
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
