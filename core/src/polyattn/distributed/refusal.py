"""A rank that cannot go on tells the others, which would else wait for it in a collective."""

from __future__ import annotations

import torch.distributed as dist

from polyattn.distributed.agreement import agree
from polyattn.distributed.failure import PeerLost
from polyattn.distributed.groups import ranks_of
from polyattn.distributed.parallel import SequenceParallel
from polyattn.errors import UnsupportedRequest


def tell_everyone(parallel: SequenceParallel, problem: Exception) -> None:
    """Publish a refusal where this rank's signature would be; ranks that refuse alike agree, others fail as well."""
    if not dist.is_available() or not dist.is_initialized():
        return
    try:
        group = ranks_of(parallel).group
    except (TypeError, ValueError):  # no group to tell, which is what the problem is
        return
    try:
        agree(group, f"refused: {str(problem) or type(problem).__name__}")
    except (UnsupportedRequest, PeerLost) as disagreement:
        raise problem from disagreement
