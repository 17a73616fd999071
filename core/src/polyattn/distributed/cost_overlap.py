"""How long groups of heads take that are exchanged and attended with side by side: a simulation of the schedule.

A rank's stream packs, attends and puts answers in order, one after the other; the link carries one exchange after the
other, in the order in which they are started. `overlap.over_groups` runs the schedule that is simulated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Groups that are on their way here at a time.
AHEAD = 2


@dataclass(frozen=True)
class Group:
    """Seconds of one group of heads: packing, on the link, attention, on the link back, and putting in order."""

    pack: float
    there: float
    attend: float
    back: float
    unpack: float


def elapsed(groups: Sequence[Group]) -> float:
    """Seconds until the last answer is in order.

    >>> one, half = Group(1.0, 4.0, 8.0, 2.0, 1.0), Group(0.5, 2.0, 4.0, 1.0, 0.5)
    >>> elapsed([one]), elapsed([half, half])
    (16.0, 12.0)
    """
    stream = link = 0.0
    arrived: list[float] = []
    returned: list[float] = []

    def leave(number: int) -> None:
        nonlocal stream, link
        stream += groups[number].pack
        link = max(link, stream) + groups[number].there
        arrived.append(link)

    for number in range(min(AHEAD, len(groups))):
        leave(number)
    for number, group in enumerate(groups):
        stream = max(stream, arrived[number]) + group.attend
        link = max(link, stream) + group.back
        returned.append(link)
        if number + AHEAD < len(groups):
            leave(number + AHEAD)
        if number:
            stream = max(stream, returned[number - 1]) + groups[number - 1].unpack
    return max(stream, returned[-1]) + groups[-1].unpack
