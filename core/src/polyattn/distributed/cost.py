"""What attention over many ranks is made of, and what each part costs, by arithmetic alone; `prices` adds them up.

Attention runs in waves: a machine works on `units` tiles at once, and a last wave that is not full takes as long as a
full one; on many ranks a rank has few tiles, so this counts. What is exchanged takes a link's latency, something for
each peer, and its bytes; ranks on one host have the inside link, each rank of a host has an across link of its own. A
ring's step takes the longer of attention and transfer, and groups of heads overlap as `cost_overlap` simulates; nothing
else overlaps, and neither slows the other down.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Link:
    """How a rank reaches others: bytes/s that it sends, seconds of a collective of no bytes, and more for each peer."""

    bytes_per_second: float
    latency: float
    per_peer: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One rank's device, and its links.

    flops   flop/s of attention where every wave is full
    units   tiles computed at once; tile: query rows of one
    copy    bytes/s, read and written, of a copy that reorders rows or heads
    launch  seconds beside the link's that a collective costs the host and the device
    """

    name: str
    flops: float
    units: int
    tile: int
    copy: float
    launch: float
    inside: Link
    across: Link


@dataclass(frozen=True)
class Work:
    """One call, on all ranks together. visible: share of (query, key) pairs that are; element: bytes."""

    rows: int
    heads: int
    dim: int
    batch: int = 1
    keys: int | None = None
    kv_heads: int | None = None
    v_dim: int | None = None
    visible: float = 1.0
    element: int = 2

    def tensor(self, rows: float, heads: float, width: float) -> float:
        """Bytes of one tensor."""
        return self.batch * rows * heads * width * self.element

    @property
    def k_rows(self) -> int:
        return self.rows if self.keys is None else self.keys

    @property
    def k_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def v_width(self) -> int:
        return self.dim if self.v_dim is None else self.v_dim


@dataclass(frozen=True)
class Ranks:
    """Where ranks are: rank number n is on host n // per_host."""

    per_host: int
    hosts: int = 1

    @property
    def total(self) -> int:
        return self.per_host * self.hosts


@dataclass(frozen=True)
class Strategy:
    """Degrees, as of `SequenceParallel`."""

    ulysses: int = 1
    ring: int = 1
    gather: int = 1

    @property
    def places(self) -> int:
        return self.ring * self.gather

    @property
    def family(self) -> str:
        """The kind of strategy, whatever its degrees."""
        named = (("ulysses", self.ulysses), ("ring", self.ring), ("gather", self.gather))
        return " x ".join(name for name, degree in named if degree > 1) or "one rank"

    def __str__(self) -> str:
        named = (("ulysses", self.ulysses), ("ring", self.ring), ("gather", self.gather))
        return " x ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "one rank"


@dataclass(frozen=True)
class Cost:
    """Seconds of a call by what they are spent on, bytes that each rank sends, and bytes it needs beyond its shard.

    attention  of the busiest rank
    waiting    latency, peers and launches of collectives, where nothing hides them
    moving     bytes on links, where nothing hides them
    copying    reordering, and merging the answers of a ring's steps
    """

    attention: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    copying: float = 0.0
    sent: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return self.attention + self.waiting + self.moving + self.copying

    def __add__(self, other: Cost) -> Cost:
        """One after the other; memory of the larger."""
        return Cost(
            self.attention + other.attention,
            self.waiting + other.waiting,
            self.moving + other.moving,
            self.copying + other.copying,
            self.sent + other.sent,
            max(self.memory, other.memory),
        )


def attention_seconds(machine: Machine, work: Work, rows: float, keys: float, heads: int) -> float:
    """One device's attention of so many query rows, keys and query heads."""
    if not rows or not keys or not heads:
        return 0.0
    waves = ceil(ceil(rows / machine.tile) * heads * work.batch / machine.units)
    pairs = waves * machine.units * machine.tile * keys * work.visible
    return 2 * pairs * (work.dim + work.v_width) / machine.flops


def alone(machine: Machine, work: Work) -> Cost:
    """The whole call on one device."""
    return Cost(attention_seconds(machine, work, work.rows, work.k_rows, work.heads))


def all_to_all(machine: Machine, ranks: Ranks, size: float, members: int) -> Cost:
    """Each of `members` consecutive ranks sends an equal part of `size` bytes to each other one."""
    near = min(members, ranks.per_host)
    inside, across = size * (near - 1) / members, size * (members - near) / members
    return _collective(machine, inside, across, members)


def all_gather(machine: Machine, ranks: Ranks, size: float, members: int, *, step: int = 1) -> Cost:
    """Each of `members` ranks, every step-th one, gets the `size` bytes of each other one.

    What another host has comes to this one once, shared out over its members' links, and is passed on inside.
    """
    near = max(min(members, ranks.per_host // step), 1)
    across = size * (members - near) / near
    inside = size * (members - 1) if near > 1 else 0.0
    return _collective(machine, inside, across, members)


def _collective(machine: Machine, inside: float, across: float, members: int) -> Cost:
    if members == 1:
        return Cost()
    link = machine.across if across else machine.inside
    moving = max(inside / machine.inside.bytes_per_second, across / machine.across.bytes_per_second)
    waiting = link.latency + machine.launch + link.per_peer * (members - 2)
    return Cost(waiting=waiting, moving=moving, sent=inside + across)
