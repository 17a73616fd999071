"""Random shapes, lengths, heads and rules, for every structure, by hypothesis; the same examples at every run."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyattn.testing.cases import Call, Case, Heads
from polyattn.testing.cases.dense import dense
from polyattn.testing.cases.key_padding import padded, ranges
from polyattn.testing.cases.mask import biased, masked
from polyattn.testing.cases.packed import packed
from polyattn.testing.cases.paged import paged
from polyattn.testing.cases.spans import spans
from polyattn.testing.check import check
from polyattn.testing.targets import Target

bounded = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

sizes = st.integers(1, 40)
lengths = st.lists(st.integers(0, 20), min_size=1, max_size=5)
sides = st.one_of(st.none(), st.integers(0, 12))


@st.composite
def _heads(draw: st.DrawFn) -> Heads:
    kv, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4), (3, 2)]))
    strides = draw(st.sampled_from(["contiguous", "transposed", "fused", "stepped", "row_gaps"]))
    v_dim = draw(st.sampled_from([None, None, 32]))
    return Heads(kv * group, kv, v_dim=v_dim, strides=(strides, strides, strides))


@st.composite
def _rules(draw: st.DrawFn) -> dict[str, Any]:
    rule: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        rule["window"] = (draw(sides), draw(sides))
    if draw(st.integers(0, 4)) == 0:
        rule["softcap"] = draw(st.sampled_from([0.7, 2.0]))
    if draw(st.integers(0, 4)) == 0:
        rule["scale"] = draw(st.sampled_from([0.0, 0.05, 0.3]))
    return rule


@st.composite
def _full_spans(draw: st.DrawFn, keys: int) -> list[tuple[int, int]]:
    count = draw(st.integers(0, min(3, keys // 2)))
    ends = sorted(draw(st.sets(st.integers(0, keys), min_size=2 * count, max_size=2 * count)))
    return list(zip(ends[::2], ends[1::2], strict=True))


@st.composite
def _dense_calls(draw: st.DrawFn) -> partial[Call]:
    batch = draw(st.integers(1, 3))
    return partial(dense, heads=draw(_heads()), batch=batch, queries=draw(sizes), keys=draw(sizes), **draw(_rules()))


@st.composite
def _key_padding_calls(draw: st.DrawFn) -> partial[Call]:
    queries = draw(st.one_of(st.none(), sizes))
    if draw(st.booleans()):
        kept = [draw(_full_spans(7)) for _ in range(draw(st.integers(1, 3)))]
        return partial(ranges, kept=kept, queries=queries, **draw(_rules()))
    kept_lengths = tuple(draw(lengths))
    return partial(padded, heads=draw(_heads()), lengths=kept_lengths, keys=20, queries=queries, **draw(_rules()))


@st.composite
def _mask_calls(draw: st.DrawFn) -> partial[Call]:
    which, queries, keys = draw(st.sampled_from([masked, biased])), draw(sizes), draw(sizes)
    shape = (draw(st.sampled_from([1, 2])), 1, draw(st.sampled_from([1, queries])), keys)
    return partial(which, heads=draw(_heads()), shape=shape, queries=queries, **draw(_rules()))


@st.composite
def _packed_calls(draw: st.DrawFn) -> partial[Call]:
    q = draw(lengths)
    k = None if draw(st.booleans()) else [draw(st.integers(0, 20)) for _ in q]
    return partial(packed, heads=draw(_heads()), q=q, k=k, spare=draw(st.sampled_from([0, 0, 3])), **draw(_rules()))


@st.composite
def _spans_calls(draw: st.DrawFn) -> partial[Call]:
    keys = draw(sizes)
    full = [draw(_full_spans(keys)) for _ in range(draw(st.integers(1, 3)))]
    return partial(spans, heads=draw(_heads()), full=full, queries=draw(st.integers(1, keys)), keys=keys)


@st.composite
def _paged_calls(draw: st.DrawFn) -> partial[Call]:
    keys = draw(lengths)
    new = [draw(st.integers(0, count)) for count in keys]
    layout: dict[str, Any] = draw(
        st.sampled_from([{}, {"new": new}, {"new": new, "layout": "packed"}] if sum(new) else [{}])
    )
    return partial(paged, heads=draw(_heads()), keys=keys, queries=max(*new, 1), **layout, **draw(_rules()))


STRUCTURES = {
    "dense": _dense_calls(),
    "key_padding": _key_padding_calls(),
    "mask": _mask_calls(),
    "packed": _packed_calls(),
    "spans": _spans_calls(),
    "paged": _paged_calls(),
}


@pytest.mark.parametrize("structure", list(STRUCTURES))
@bounded
@given(data=st.data())
def test_random_calls(conformance_target: Target, structure: str, data: st.DataObject) -> None:
    """As the written cases, at sizes that nobody chose."""
    build = data.draw(STRUCTURES[structure], label="call")
    dtype = data.draw(st.sampled_from(conformance_target.dtypes), label="dtype")
    lse, grad = data.draw(st.booleans(), label="lse"), data.draw(st.booleans(), label="grad")
    name = f"{structure}/random-{zlib.crc32(repr((build.args, build.keywords)).encode())}"
    case = Case(name, structure, build, lse=lse, grad=grad)
    assert check(case, conformance_target, dtype).problems == ()
