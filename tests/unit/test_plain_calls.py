"""The plain calls that tell what is usable are such as `pa.attention` makes of real tensors and structures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyattn.arguments import checked
from polyattn.door.backend import Features
from polyattn.door.request import KINDS
from polyattn.plain_calls import Heads, plain_calls
from polyattn.plan import describe
from polyattn.sample import sample_structure

CLAIMED = Features(kinds=frozenset(KINDS), dtypes=frozenset({"float16", "float32"}), page_sizes=(16, 100), gqa=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [Heads(), Heads(6, 2, 40)])
def test_a_plain_call_is_what_a_real_one_is_described_as(kind: str, heads: Heads) -> None:
    calls = list(plain_calls(CLAIMED, "toy:1", kinds=(kind,), heads=heads))
    assert len(set(calls)) == len(calls) > 0
    for request in calls:
        assert request.device == "toy:1"
        q, k, v = (
            torch.empty(facts.shape, dtype=getattr(torch, facts.dtype), device="meta")
            for facts in (request.q, request.k, request.v)
        )
        where = torch.device("cpu" if request.structure_facts.host else "meta")
        real, _, _ = describe(
            q, k, v, sample_structure(request, where), checked(False, None, 0.0, False, ()), scale=None, lse=False,
            out=None, quant=None,
        )  # fmt: skip
        assert replace(real, device=request.device) == request


def test_where_a_slot_has_no_common_size_its_least_is_asked_for() -> None:
    odd = Features(kinds=frozenset({"paged"}), dtypes=frozenset({"float16"}), head_dims=(80, 72), page_sizes=(48, 24))
    asked = {
        (one.head_dim, one.structure_facts.page_size)
        for one in plain_calls(odd, "toy:0", kinds=odd.kinds, heads=Heads())
    }
    assert asked == {(72, 24)}
