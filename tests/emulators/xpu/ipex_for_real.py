"""The real IPEX 2.8 against its emulator, call by call; by hand, for it needs a torch of its own (7 GB).

    python -m venv FOLDER
    FOLDER/bin/pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0 "numpy<2.4" packaging psutil
    FOLDER/bin/python -m tests.emulators.xpu.ipex_for_real

It says what agrees and ends with 1 where anything does not. The wheel has the CPU's functions only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from tests.emulators.xpu import ipex

#: Arguments of `varlen_attention` that a case leaves as they are.
PLAIN: dict[str, Any] = {
    "alibi_slopes": None, "pdropout": 0.0, "zero_tensors": False, "is_causal": False, "return_softmax": False,
    "gen_": None, "window_size_left": -1, "window_size_right": -1, "softcap": -1.0,
}  # fmt: skip
#: Name -> boundaries of queries and keys, and what is asked. The scale asked is always a wrong one.
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "documents": ([0, 3, 8], [0, 4, 9], {}),
    "causal, square": ([0, 4, 8], [0, 4, 8], {"is_causal": True}),
    "causal, lengths mixed": ([0, 5, 8], [0, 2, 9], {"is_causal": True}),
    "a document without keys": ([0, 3, 8], [0, 0, 9], {}),
    "a document without queries": ([0, 0, 8], [0, 4, 9], {}),
    "a window": ([0, 4], [0, 4], {"window_size_left": 1}),
    "softcap": ([0, 4], [0, 4], {"softcap": 5.0}),
    "zero_tensors": ([0, 4], [0, 4], {"zero_tensors": True}),
    "return_softmax": ([0, 4], [0, 4], {"return_softmax": True}),
    "rows of no document": ([0, 4], [0, 4], {"spare": 2}),
}
#: Name -> boundaries of queries and keys over pages, and what is asked.
PAGED: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "plain": ([0, 3, 8], [0, 20, 29], {}),
    "causal": ([0, 3, 8], [0, 20, 29], {"is_causal": True}),
    "rows without a key": ([0, 6, 8], [0, 2, 11], {"is_causal": True}),
    "a window": ([0, 3, 8], [0, 20, 29], {"left": 4, "right": 2}),
    "softcap": ([0, 3, 8], [0, 20, 29], {"softcap": 2.0}),
    "a document without keys": ([0, 3, 8], [0, 0, 9], {}),
}


def main() -> int:
    """Every case on both; what differs is told."""
    import intel_extension_for_pytorch as real

    wrong = list(_signatures(real))
    for name, (ends_q, ends_k, asked) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            answers = [_varlen(f, ends_q, ends_k, dtype, **asked) for f in _both(real)]
            wrong += _told(f"varlen_attention, {name}, {dtype}", answers)
    for name, (ends_q, ends_k, asked) in PAGED.items():
        answers = [
            _paged(kind, ends_q, ends_k, **asked) for kind in (real.llm.modules.PagedAttention, ipex.PagedAttention)
        ]
        wrong += _told(f"PagedAttention, {name}", answers)
    return 1 if wrong else 0


def _both(real: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return real.llm.functional.varlen_attention, ipex.varlen_attention


def _signatures(real: Any) -> Iterator[str]:
    pairs = [_both(real)]
    for name in ("flash_attn_varlen_func", "reshape_and_cache"):
        pairs.append((getattr(real.llm.modules.PagedAttention, name), getattr(ipex.PagedAttention, name)))
    for one, other in pairs:
        names = [list(inspect.signature(f).parameters) for f in (one, other)]
        if names[0] != names[1]:
            _say(f"DIFFERS: parameters of {one.__name__}: {names[0]} and {names[1]}")
            yield one.__name__


def _varlen(attend: Any, ends_q: list[int], ends_k: list[int], dtype: torch.dtype, spare: int = 0, **asked: Any) -> Any:
    torch.manual_seed(0)
    q = torch.randn(ends_q[-1] + spare, 4, 40).to(dtype)
    k, v = (torch.randn(ends_k[-1] + spare, 2, 40).to(dtype) for _ in range(2))
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)]
    longest = [max(b - a for a, b in pairwise(ends)) for ends in (ends_q, ends_k)]
    named = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1], "softmax_scale": 3.0}
    try:
        return attend(q, k, v, torch.full_like(q, 7.0), *bounds, **PLAIN | named | asked)
    except Exception as error:
        return error


def _paged(kind: Any, ends_q: list[int], ends_k: list[int], **asked: Any) -> Any:
    torch.manual_seed(0)
    lengths = [b - a for a, b in pairwise(ends_k)]
    cache = [torch.zeros(8, 2, 16, 64) for _ in range(2)]
    table = torch.tensor([[5, 1], [0, 3]], dtype=torch.int32)
    for row, length in zip(table.tolist(), lengths, strict=True):
        slots = torch.tensor([row[i // 16] * 16 + i % 16 for i in range(length)], dtype=torch.int32)
        if length:
            kind.reshape_and_cache(torch.randn(length, 2, 64), torch.randn(length, 2, 64), *cache, slots)
    q, out = torch.randn(ends_q[-1] + 1, 4, 64), torch.full((ends_q[-1] + 1, 4, 64), 7.0)
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)]
    try:
        kind.flash_attn_varlen_func(
            out, q, *cache, *bounds, 8, 20, 0.2, asked.get("is_causal", False), table, None,
            asked.get("left", -1), asked.get("right", -1), softcap=asked.get("softcap", -1.0),
        )  # fmt: skip
    except Exception as error:
        return error
    return out


def _told(name: str, answers: list[Any]) -> list[str]:
    one, other = answers
    if isinstance(one, Exception) or isinstance(other, Exception):
        same = type(one) is type(other)
        said = f"{type(one).__name__} and {type(other).__name__}"
    else:
        difference = (one.float() - other.float()).abs()
        same = torch.equal(one.isnan(), other.isnan()) and bool((difference.nan_to_num() <= 2e-2).all())
        strange = [int(answer.isnan().sum()) for answer in answers]
        said = f"off by {difference.nan_to_num().max().item():.1e}, NaN {strange[0]} and {strange[1]}"
    _say(f"{'agrees' if same else 'DIFFERS'}: {name}: {said}")
    return [] if same else [name]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
