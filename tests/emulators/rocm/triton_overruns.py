"""What programs of flash_attn's Triton kernel write outside of their rows, when none of their rows sees a key.

Under causal such a program exits early, with stores that are not masked as the others are. Whose write to an element
comes last is not defined: what two programs write is no answer, and NaN here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.emulators.cuda.flash2 import Document
from tests.emulators.rocm import stack

#: Rows that one program has, in the only configuration that is not tuned.
BLOCK = 64
NAN = float("nan")


def early(part: Document, max_q: int) -> Iterator[int]:
    """The first rows of the programs of a document that exit early; one of an empty document is among them."""
    queries, keys = part.q1 - part.q0, part.k.shape[0]
    for start in range(0, min(queries + 1, max_q), BLOCK):
        if min(keys, start + BLOCK + keys - queries) <= 0:
            yield start


def spoil_out(out: torch.Tensor, parts: list[Document], max_q: int) -> None:
    """Zeros for a power of two of columns, at least 16: past the last head of a block's last row, into the next row."""
    rows, _, width = out.shape
    spilt = max(16, 1 << (width - 1).bit_length()) - width
    for part in parts if spilt else ():
        for start in early(part, max_q):
            behind = part.q0 + min(start + BLOCK, part.q1 - part.q0)
            if part.q1 == part.q0:
                continue
            if behind == rows:
                stack.silent(f"flash_attn's Triton route writes {spilt} elements past the end of its output")
            else:
                out[behind, 0, :spilt] = NAN


def spoil_lse(lse: torch.Tensor, parts: list[Document], max_q: int) -> None:
    """Zeros for as many rows as a block or the longest document has: into the documents behind, past the tensor."""
    for part in parts:
        for start in early(part, max_q):
            stop = part.q0 + min(start + BLOCK, max_q)
            if stop > lse.shape[0]:
                stack.silent(f"flash_attn's Triton route writes {stop - lse.shape[0]} rows past the end of its LSE")
            for other in parts:
                lse[max(part.q1, other.q0) : min(stop, other.q1)] = NAN
