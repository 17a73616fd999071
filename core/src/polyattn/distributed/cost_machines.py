"""Machines whose costs are known, and where each figure comes from."""

from __future__ import annotations

from polyattn.distributed.cost import Link, Machine

#: The inside link was measured by hand on two H200 (benchmarks/results/distributed_by_hand.json); flops, copy and
#: launch are fitted to that file's two smaller shapes under Ulysses by `cost_fit.fitted`, rounded; a test compares.
#: (Its two larger ones cannot tell launch from copy: half a percent of their time is more than all launches.) The
#: cost of a peer and everything across hosts (400 Gbit/s a rank) is ASSUMED: nobody has measured it here.
H200 = Machine(
    name="H200",
    flops=689e12,
    units=132,
    tile=128,
    copy=2.94e12,
    launch=36e-6,
    inside=Link(293e9, 49e-6, per_peer=1e-6),
    across=Link(45e9, 60e-6, per_peer=1e-6),
)
#: What a reader must be told of it.
ASSUMED = (
    "assumed, not measured: the cost of each further peer, that transfers beside attention do not slow it down, and "
    "all figures across hosts (45 GB/s a rank, 60 us)"
)
