"""What cannot be shared out is refused on every rank, with one message, before anything is communicated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel
from tests.distributed.counting import exchanges
from tests.distributed.glued_cases import call_of
from tests.distributed.pool import Pool

HERE = __name__
ROWS = 12


def paged() -> Any:
    return pa.Paged(torch.zeros(2, 1, dtype=torch.int32), [4, 4])


def refused(name: str) -> dict[str, Any]:
    """Arguments of a call over two ranks that hold six rows each."""
    bias = torch.zeros(1, 1, ROWS, ROWS, requires_grad=True)
    cuts: dict[str, Any] = {
        "video tiles": {"structure": call_of("video tiles", ROWS, ROWS).structure},
        "block map": {"structure": call_of("block map", ROWS, ROWS).structure},
        "spans of local queries": {"structure": pa.Spans([[(0, 2)]] * 2, query_ranges=[(0, ROWS, 0)])},
        "capacity": {"structure": pa.Packed.from_lengths([ROWS], capacity=(2, ROWS)), "packed": True},
        "a bias that wants a gradient": {"structure": pa.Mask(bias)},
        "paged": {"structure": paged()},
        "a structure of another length": {"structure": pa.KeyPadding.from_lengths([4, 4], ROWS + 2)},
        "no slot with an lse": {"backend": "no_such_backend"},
        "window and spans": {"structure": pa.Spans([[(0, 2)]] * 2), "window": 2},
        "a gate without tiles": {"gate": torch.zeros(2, ROWS // 2, 4, 8)},
        "a window below zero": {"window": -1},
        "joint of other heads": {"joint": pa.Joint(*(torch.zeros(2, 1, 3, 8) for _ in range(3)))},
        "more counted than held": {"replicated": pa.Replicated(prefix=9)},
    }
    return cuts[name]


def tries(group: dist.ProcessGroup, degrees: dict[str, int], name: str) -> tuple[str, str, Counter[str]]:
    """(type, text) of the refusal, and what was communicated before it."""
    arguments = dict(refused(name))
    packed = arguments.pop("packed", False)
    q = torch.randn(1 if packed else 2, ROWS // 2, 4, 8)
    parallel = SequenceParallel(**degrees, mesh=group)
    with exchanges() as counts:
        try:
            pa.attention(q, q, q, parallel=parallel, **arguments)
        except (ValueError, TypeError) as error:
            kind, text = type(error).__name__, str(error)
        else:
            kind, text = "nothing", ""
    out = pa.attention(q, q, q, parallel=parallel)  # the ranks are still together
    assert out.shape == q.shape
    return kind, text, Counter({name: n for name, n in counts.items() if name != "agreement"})


@pytest.mark.parametrize(
    ("name", "degrees", "kind", "words"),
    [
        *(
            (name, degrees, "UnsupportedRequest", words)
            for degrees in ({"ring": 2}, {"gather": 2})
            for name, words in (
                ("video tiles", ["VideoTiles", "ulysses"]),
                ("block map", ["BlockMap", "ulysses"]),
                ("spans of local queries", ["query_ranges", "global"]),
                ("capacity", ["capacity"]),
            )
        ),
        ("a bias that wants a gradient", {"ulysses": 2}, "UnsupportedRequest", ["gradient", "Mask"]),
        ("paged", {"ulysses": 2}, "UnsupportedRequest", ["Paged"]),
        ("a structure of another length", {"ulysses": 2}, "ValueError", ["14 rows", "holds 6", "rows="]),
        ("no slot with an lse", {"ring": 2}, "ValueError", ["no_such_backend"]),
        ("window and spans", {"ring": 2}, "UnsupportedRequest", ["spans", "window"]),
        ("a gate without tiles", {"ulysses": 2}, "ValueError", ["gate", "VideoTiles"]),
        ("a window below zero", {"gather": 2}, "ValueError", ["window"]),
        ("joint of other heads", {"ulysses": 2}, "ValueError", ["joint"]),
        ("more counted than held", {"ring": 2}, "ValueError", ["replicated", "9"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_one_message_on_every_rank(pool: Pool, name: str, degrees: dict[str, int], kind: str, words: list[str]) -> None:
    answers = pool.run(2, f"{HERE}:tries", degrees, name)
    assert [answer[0] for answer in answers] == [kind, kind]
    texts = {text.replace("rank 0 should", "rank 1 should") for _, text, _ in answers}
    assert len(texts) == 1
    for word in words:
        assert word in answers[0][1]
    assert [answer[2] for answer in answers] == [Counter(), Counter()]


def uneven(group: dist.ProcessGroup) -> str:
    q = torch.randn(1, 5 - dist.get_rank(group), 2, 8)
    with pytest.raises(pa.UnsupportedRequest) as caught:
        pa.attention(q, q, q, parallel=SequenceParallel(ring=2, mesh=group))
    out = pa.attention(q, q, q, parallel=SequenceParallel(ring=2, mesh=group, rows=9))
    assert out.shape == q.shape
    return str(caught.value)


def test_rows_that_nobody_stated_are_refused_on_every_rank_and_work_once_stated(pool: Pool) -> None:
    one, other = pool.run(2, f"{HERE}:uneven")
    assert one == other
    assert "rows of q" in one
    assert "rows=" in one


def of_four(group: dist.ProcessGroup) -> list[str]:
    q = torch.randn(1, 4, 2, 8)
    texts = []
    for degrees in ({"ulysses": 2}, {"ulysses": 3, "ring": 2}):
        with pytest.raises(pa.UnsupportedRequest) as caught:
            pa.attention(q, q, q, parallel=SequenceParallel(**degrees, mesh=group))
        texts.append(str(caught.value))
    return texts


def test_a_group_of_another_size_is_refused(pool: Pool) -> None:
    for texts in pool.run(4, f"{HERE}:of_four"):
        assert "2 ranks" in texts[0]
        assert "4" in texts[0]
        assert "6 ranks" in texts[1]


def test_degrees_that_contradict_each_other_are_refused_when_stated() -> None:
    with pytest.raises(ValueError, match="ring=2 and gather=2"):
        SequenceParallel(ring=2, gather=2)
    with pytest.raises(ValueError, match="one number for each of 2 ranks"):
        SequenceParallel(ring=2, rows=(1, 2, 3))
    with pytest.raises(ValueError, match="rows"):
        SequenceParallel(ring=2, rows=-1)
    with pytest.raises(ValueError, match="gather"):
        SequenceParallel(gather=0)


def test_complete_keys_are_a_yes_or_no() -> None:
    with pytest.raises(TypeError, match=r"replicated\.kv: True or False is needed, got int 1"):
        pa.Replicated(kv=1)  # type: ignore[arg-type]
