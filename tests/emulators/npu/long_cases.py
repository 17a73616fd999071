"""Conformance cases of at least 2048 rows, for a backend that takes no fewer: the kit's own are short."""

from __future__ import annotations

from functools import partial

from polyattn.structures import KeyPadding, Packed
from polyattn.testing.cases import Case
from polyattn.testing.cases.call import Call
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, contiguous_buffer, spoil

ROWS, MORE = 2048, 2100


def dense(make: Maker, heads: Heads = PLAIN, *, queries: int = MORE, keys: int = MORE, **rule: float | bool) -> Call:
    """A plain call."""
    return Call(*make.qkv((1, queries), (1, keys), heads), **rule)  # type: ignore[arg-type]


def padded(make: Maker, heads: Heads = PLAIN, *, used: int = ROWS + 3, queries: str = "same") -> Call:
    """Keys of a padded end hold anything."""
    call = dense(make, heads)
    spoil(*(t[:, used:].movedim(1, 0) for t in (call.k, call.v)))
    return Call(call.q, call.k, call.v, KeyPadding.from_lengths([used], MORE, queries=queries))


def packed(make: Maker, lengths: tuple[int, ...] = (MORE,)) -> Call:
    """Documents, each long."""
    rows = sum(lengths)
    return Call(*make.qkv((rows,), (rows,)), Packed.from_lengths(list(lengths)))


def real_and_pad(make: Maker) -> Call:
    """One document and rows that answer 0."""
    return Call(*make.qkv((MORE,), (MORE,)), Packed.real_and_pad(ROWS, MORE))


CASES = (
    Case("dense/long", "dense", dense),
    Case("dense/long_exact_blocks", "dense", partial(dense, queries=ROWS, keys=ROWS)),
    Case("dense/long_cross", "dense", partial(dense, queries=ROWS, keys=2304)),
    Case("dense/long_gqa", "dense", partial(dense, heads=Heads(4, 2))),
    Case("dense/long_head_dim_128", "dense", partial(dense, heads=Heads(2, 2, head_dim=128))),
    Case("dense/long_head_dim_256", "dense", partial(dense, heads=Heads(1, 1, head_dim=256))),
    Case("dense/long_v_dim", "dense", partial(dense, heads=Heads(2, 2, v_dim=32))),
    Case("dense/long_strides", "dense", partial(dense, heads=Heads(strides=("transposed", "fused", "fused")))),
    Case("dense/long_scale", "dense", partial(dense, scale=0.3)),
    Case("dense/long_scale_zero", "dense", partial(dense, scale=0.0)),
    Case("dense/long_scale_negative", "dense", partial(dense, scale=-0.1)),
    Case("dense/long_causal", "dense", partial(dense, causal=True)),
    Case("dense/long+lse", "dense", dense, lse=True),
    Case("dense/long+grad", "dense", dense, grad=True),
    Case("dense/long_out", "dense", dense, buffer=contiguous_buffer),
    Case("dense/long_compiled", "dense", dense, compiled=True),
    Case("dense/long_autocast", "dense", dense, autocast=True),
    Case("key_padding/long", "key_padding", padded),
    Case("key_padding/long_all_queries", "key_padding", partial(padded, queries="all")),
    Case("key_padding/long_gqa", "key_padding", partial(padded, heads=Heads(4, 2))),
    Case("key_padding/long_short_prefix", "key_padding", partial(padded, used=100)),
    Case("packed/long", "packed", packed),
    Case("packed/long_exact_blocks", "packed", partial(packed, lengths=(ROWS,))),
    Case("packed/long_two_documents", "packed", partial(packed, lengths=(ROWS, MORE))),
    Case("packed/long_real_and_pad", "packed", real_and_pad),
)
