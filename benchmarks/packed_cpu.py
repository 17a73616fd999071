"""Packed documents on the CPU: our slot, a bare loop of SDPA calls plus cat, and SDPA under a block-diagonal mask.

python benchmarks/packed_cpu.py [--write] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from _measure import Samples, interleaved, report, target
from torch.nn.functional import scaled_dot_product_attention

import polyattn as pa
from polyattn.backends import cpu

HEADS, HEAD_DIM = 8, 64


def main() -> int:
    """Measure 8 documents of 512, 64 of 64, and 24 of very different lengths; ratios in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    uneven = [17 + 13 * (7 * i % 24) for i in range(24)]
    cases = {
        "8 documents of 512, float32": ([512] * 8, torch.float32, {"loop": 1.10, "mask": 10.0}),
        "8 documents of 512, bfloat16": ([512] * 8, torch.bfloat16, {"loop": 1.10, "mask": 6.5}),
        "64 documents of 64, float32": ([64] * 64, torch.float32, {"loop": 1.0}),
        "64 documents of 64, bfloat16": ([64] * 64, torch.bfloat16, {"loop": 1.0}),
        "24 documents of 17 to 316, float32": (uneven, torch.float32, {"loop": 1.10}),
    }
    milliseconds, targets = {}, {}
    for name, (lengths, dtype, wanted) in cases.items():
        with torch.inference_mode():
            samples = interleaved(_calls(lengths, dtype), rounds=asked.rounds, seconds=0.05)
        milliseconds[name] = {call: [round(taken / 1e3, 3) for taken in rounds] for call, rounds in samples.items()}
        targets[f"{name}: ours / loop"] = target(_ratio(samples, "ours", "loop"), at_most=wanted["loop"])
        if "mask" in wanted:
            targets[f"{name}: mask / ours"] = target(_ratio(samples, "mask", "ours"), at_least=wanted["mask"])
    return report("packed_cpu", {"milliseconds": milliseconds, "targets": targets}, write=asked.write)


def _ratio(samples: Samples, slow: str, fast: str) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(samples[slow], samples[fast], strict=True))


def _calls(lengths: list[int], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(sum(lengths), HEADS, HEAD_DIM, dtype=dtype) for _ in range(3))
    structure = pa.Packed.from_lengths(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document[:, None] == document[None, :]
    scale = HEAD_DIM**-0.5

    def ours() -> torch.Tensor:
        meta = structure.bind(q.device, q.shape, k.shape)
        return cpu.sdpa_packed(
            q, k, v, None,
            meta=meta, causal=False, scale=scale, window=None, softcap=0.0, need_lse=False, options=(),
        )[0]  # fmt: skip

    def loop() -> torch.Tensor:
        pieces, start = [], 0
        for length in lengths:
            rows = slice(start, start + length)
            one = (tensor[rows].transpose(0, 1)[None] for tensor in (q, k, v))
            pieces.append(scaled_dot_product_attention(*one)[0].transpose(0, 1))
            start += length
        return torch.cat(pieces)

    def masked() -> torch.Tensor:
        one = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return scaled_dot_product_attention(*one, attn_mask=mask)[0].transpose(0, 1)

    torch.testing.assert_close(ours(), loop())
    calls: dict[str, Callable[[], Any]] = {"ours": ours, "loop": loop}
    return calls | ({"mask": masked} if max(lengths) == 512 else {})


if __name__ == "__main__":
    sys.exit(main())
