"""`explain` says how a call would be shared out, without a group and without communicating."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel
from tests.distributed.counting import exchanges
from tests.distributed.pool import Pool

HERE = __name__


def told(parallel: SequenceParallel, **arguments: object) -> pa.Explanation:
    q, k = torch.zeros(1, 16, 6, 8), torch.zeros(1, 16, 2, 8)
    return pa.explain(q, k, k, parallel=parallel, **arguments)  # type: ignore[arg-type]


def test_ulysses_is_one_call_over_all_rows_with_a_share_of_the_heads() -> None:
    found = told(SequenceParallel(ulysses=2))
    assert (found.request.q.shape, found.request.k.shape) == ((1, 32, 3, 8), (1, 32, 1, 8))
    assert found.chosen is not None
    text = str(found)
    assert "3/1 3/1" in text
    assert "ulysses" in text
    assert "rank 0 of 2" in text


def test_a_causal_ring_moves_rows_and_says_what_that_spares() -> None:
    found = told(SequenceParallel(ring=4), causal=True)
    assert found.request.lse
    assert any("zigzag" in note for note in found.notes)
    assert not any("zigzag" in note for note in told(SequenceParallel(ring=4)).notes)


def test_gather_sees_all_keys_from_its_own_rows() -> None:
    found = told(SequenceParallel(gather=4))
    assert (found.request.q.shape[1], found.request.k.shape[1]) == (16, 64)


def test_a_cut_on_the_diagonal_is_a_causal_call_not_a_windowed_one() -> None:
    request = told(SequenceParallel(gather=4), causal=True).request
    assert (request.q.shape[1], request.k.shape[1], request.causal, request.window) == (16, 16, True, None)


def test_complete_keys_are_told_to_need_no_communication() -> None:
    found = told(SequenceParallel(ulysses=2), replicated=pa.Replicated(kv=True))
    assert any("nothing is communicated" in note for note in found.notes)


def test_what_cannot_be_shared_out_is_a_refusal_not_an_error() -> None:
    found = told(SequenceParallel(ring=2), structure=pa.VideoTiles(pa.VideoLayout((32, 1, 1)), (2, 1, 1), topk=2))
    assert found.chosen is None
    assert "VideoTiles" in str(found.refusal)
    with pytest.raises(ValueError, match="rows="):
        told(SequenceParallel(ring=2), structure=pa.KeyPadding.from_lengths([9], 50))


def silently(group: dist.ProcessGroup) -> tuple[int, str]:
    with exchanges() as counts:
        found = told(SequenceParallel(ring=3, mesh=group), causal=True)
    assert counts == Counter()
    return found.request.k.shape[1], found.notes[0]


def test_each_rank_is_told_its_own_part(pool: Pool) -> None:
    answers = pool.run(3, f"{HERE}:silently")
    assert [note.endswith(f"rank {rank} of 3") for rank, (_, note) in enumerate(answers)] == [True] * 3
