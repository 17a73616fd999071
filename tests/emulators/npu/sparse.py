"""The sparse modes of npu_fusion_attention: which scores of one matrix a mode hides, and what a mode demands."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from tests.emulators.npu.stack import lint, require_op

#: Side of the compressed causal mask.
SIDE = 2048
#: Modes whose mask is the compressed one, whatever the lengths.
COMPRESSED = (2, 3, 4, 7, 8)


@lru_cache(maxsize=1)
def _compressed() -> torch.Tensor:
    return torch.ones(SIDE, SIDE, dtype=torch.bool).triu(1)


def is_compressed(mask: torch.Tensor) -> bool:
    """Whether a mask of that side hides what is right of the diagonal."""
    return bool((mask.bool() == _compressed()).all())


class Band(NamedTuple):
    """pre_tokens and next_tokens."""

    pre: int
    next: int


def causal(queries: int, keys: int, shift: int) -> torch.Tensor:
    """Bool [Sq,Skv], True where key > query + shift: what a causal mode hides."""
    return torch.arange(keys)[None] > torch.arange(queries)[:, None] + shift


def outside(queries: int, keys: int, band: Band, shift: int) -> torch.Tensor:
    """Bool [Sq,Skv], True outside query + shift - pre <= key <= query + shift + next."""
    row, key = torch.arange(queries)[:, None] + shift, torch.arange(keys)[None]
    return (key < row - band.pre) | (key > row + band.next)


def hidden(mode: int, queries: int, keys: int, band: Band, mask: torch.Tensor, prefix: int | None) -> torch.Tensor:
    """Bool [1|N,Sq,Skv] that one matrix's mask hides; `mask` is that matrix's own part of it where it is full-size."""
    if mode == 2:
        return causal(queries, keys, 0)[None]
    if mode == 3:
        return causal(queries, keys, keys - queries)[None]
    if mode == 4:
        return outside(queries, keys, band, keys - queries)[None]
    if mode == 6:
        return (causal(queries, keys, keys - queries) & (torch.arange(keys)[None] >= prefix))[None]
    drop = mask.bool() if mask.dim() == 3 else mask.bool()[None]
    if mode == 0:
        beside = outside(queries, keys, band, 0)
        lint(bool((drop | ~beside).all()), "sparse_mode 0: the mask shows scores that pre/next_tokens hide")
        drop = drop | beside
    return drop


def zeroes_empty_rows(mode: int, queries: int, keys: int, band: Band, prefix: int | None, packed: bool) -> bool:
    """Whether the kernel handles rows that see nothing without being told to by inner_precise=2."""
    if mode == 3:
        return not packed and queries > keys
    if mode in (0, 4):
        shift = keys - queries if mode == 4 else 0
        return band.next + shift < 0 or band.pre - shift < queries - keys
    return mode in (5, 6) and not prefix and queries > keys


def check_mask(op: str, mode: int, mask: torch.Tensor, matrix: tuple[int, int, int, int], packed: bool) -> None:
    """The shapes of atten_mask. matrix is (B, N, Sq, Skv); packed: (documents, N, the longest Sq, the longest Skv)."""
    require_op(mask.dtype in (torch.bool, torch.uint8), op, f"atten_mask is {mask.dtype}, not bool or uint8", 161002)
    shape, (batch, heads, queries, keys) = tuple(mask.shape), matrix
    if mode in COMPRESSED:
        full_size = [(batch, heads, SIDE, SIDE), (batch, 1, SIDE, SIDE), (1, 1, SIDE, SIDE)]
        fits = shape == (SIDE, SIDE) or ((queries, keys) == (SIDE, SIDE) and shape in full_size)
        require_op(fits, op, f"sparse_mode {mode} takes an atten_mask of {SIDE}x{SIDE}, not {shape}")
        require_op(is_compressed(mask), op, "(emulator) a compressed atten_mask that is not triu(1)")
        return
    if mode == 6:
        require_op(shape == (3072, SIDE), op, f"sparse_mode 6 takes an atten_mask of 3072x{SIDE}, not {shape}")
        lower = (torch.arange(SIDE) >= SIDE // 2).expand(3072 - SIDE, SIDE)
        fits = is_compressed(mask[:SIDE]) and torch.equal(mask[SIDE:].bool(), lower)
        require_op(fits, op, "(emulator) an atten_mask of 3072x2048 with other contents than the kernel takes as given")
        return
    if packed:
        return
    square = (queries, keys)
    known = [(batch, heads, *square), (batch, 1, *square)]
    if mode != 5 or batch == 1:
        known += [(1, 1, *square), square]
    require_op(shape in known, op, f"atten_mask {shape} is none of {known}: it is not broadcast")


def check_band(op: str, band: Band, shift: int, queries: int, keys: int) -> None:
    """Whether pre/next_tokens of modes 0 and 4 leave anything; `shift` brings them to the top-left corner."""
    pre, after = band.pre - shift, band.next + shift
    words = f"pre_tokens {band.pre} and next_tokens {band.next} do not fit {queries} x {keys}"
    require_op(pre >= 0 or after >= 0, op, words)
    if pre < 0:
        require_op(after >= -pre and -pre < keys, op, words)
    if after < 0:
        require_op(pre >= -after and -after < queries, op, words)


def check_documents(op: str, mode: int, band: Band, lengths: list[tuple[int, int]]) -> None:
    """What each mode demands of packed documents, given as (Sq, Skv); asked only where there is a mask."""
    for queries, keys in lengths:
        if mode == 0:
            trivial = band.pre >= queries and band.next >= keys
            require_op(band.next >= 0, op, "TND: next_tokens < 0")
            fits = trivial or queries == 0 or keys + band.pre >= queries
            require_op(fits and (band.pre >= 0 or band.next >= -band.pre), op, "TND: pre_tokens hides whole rows")
        if mode == 3 or mode == 7:
            require_op(queries <= keys, op, f"TND, sparse_mode {mode}: a document of {queries} queries, {keys} keys")
        if mode == 4:
            fits = band.pre >= 0 and (band.next >= 0 or band.pre + band.next >= 0)
            require_op(fits and (queries == 0 or queries - band.next <= keys), op, "TND: the band leaves a document")
    used = [pair for pair in lengths if pair[0]]
    if mode in (7, 8) and used:
        queries, keys = used[-1] if mode == 7 else used[0]
        fits = band.pre >= keys and queries - band.next <= keys and (mode == 8 or band.next <= 0)
        require_op(fits, op, f"TND, sparse_mode {mode}: pre/next_tokens do not fit the cut document")


def mode_of_document(mode: int, index: int, lengths: list[tuple[int, int]]) -> int:
    """What modes 7 and 8 mean for one document; other modes mean the same for each."""
    used = [place for place, (queries, _) in enumerate(lengths) if queries]
    if mode == 7:
        return 4 if used and index == used[-1] else 3
    if mode == 8:
        return 4 if used and index == used[0] else 2
    return mode
