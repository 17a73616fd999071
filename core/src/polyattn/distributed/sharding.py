"""`shard` and `gather`: a whole sequence to this rank's rows of it, and back."""

from __future__ import annotations

import torch

from polyattn.distributed.agreement import agree
from polyattn.distributed.failure import Communicating
from polyattn.distributed.gathering import gathered
from polyattn.distributed.groups import ranks_of
from polyattn.distributed.parallel import SequenceParallel, check_parallel
from polyattn.distributed.peers import Peers
from polyattn.distributed.refusal import tell_everyone
from polyattn.distributed.rows import consecutive
from polyattn.distributed.uncompiled import uncompiled


@uncompiled
def shard(tensor: torch.Tensor, parallel: SequenceParallel | None, dim: int = 1) -> torch.Tensor:
    """This rank's rows along `dim`, a view: as equal numbers as can be, the first ranks hold one more.

    A `SequenceParallel` that states other numbers for so many rows is followed. Rows may be fewer than ranks.

    >>> import torch, polyattn as pa
    >>> pa.distributed.shard(torch.zeros(2, 7), pa.distributed.SequenceParallel()).shape
    torch.Size([2, 7])
    """
    check_parallel(parallel)
    if parallel is None or parallel.world_size == 1:
        return tensor
    start, end = consecutive(parallel.shares(tensor.shape[dim]))[ranks_of(parallel).rank]
    return tensor.narrow(dim, start, end - start)


@uncompiled
def gather(
    tensor: torch.Tensor, parallel: SequenceParallel | None, dim: int = 1, rows: int | tuple[int, ...] | None = None
) -> torch.Tensor:
    """The whole sequence of the ranks' shards along `dim`, on every rank; what `shard` undoes.

    rows: how many there are, split as `shard` splits them, or those of each rank; None: as `parallel` states, else
    every rank holds as many as this one. The gradient of a shard is the sum over the ranks.

    >>> import torch, polyattn as pa
    >>> pa.distributed.gather(torch.zeros(2, 7), pa.distributed.SequenceParallel()).shape
    torch.Size([2, 7])
    """
    check_parallel(parallel)
    if parallel is None or parallel.world_size == 1:
        return tensor
    ranks = ranks_of(parallel)
    try:
        sizes = shares_of(parallel, ranks.rank, rows, tensor.shape[dim])
        mine = tensor.movedim(dim, 0)
    except Exception as problem:  # whatever it is, the others would wait for this rank
        tell_everyone(parallel, problem)
        raise
    wants_grad = torch.is_grad_enabled() and tensor.requires_grad
    agree(
        ranks.group,
        {"gather rows": sizes, "of": (*mine.shape[1:],), "dtype": mine.dtype, "along": dim, "gradients": wants_grad},
    )
    ranks.meet(tensor.device)
    with Communicating(ranks.group, f"gather over {parallel.degrees}"):
        return gathered(mine, sizes, Peers(ranks.group, ranks.members, ranks.rank)).movedim(0, dim)


def shares_of(parallel: SequenceParallel, rank: int, rows: int | tuple[int, ...] | None, held: int) -> tuple[int, ...]:
    """Rows of each rank, as stated, else as many on each as on this one; ValueError where this one holds others."""
    stated = parallel.rows if rows is None else rows
    if stated is None:
        return (held,) * parallel.world_size
    sizes = parallel.holding(stated).shares(stated if isinstance(stated, int) else sum(stated))
    if sizes[rank] != held:
        raise ValueError(
            f"rows: rank {rank} is said to hold {sizes[rank]} of {sum(sizes)} rows, its tensor has {held}; "
            "state the rows of each rank"
        )
    return sizes
