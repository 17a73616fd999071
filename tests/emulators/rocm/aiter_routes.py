"""Which kernels aiter sends a call to, Composable Kernel's or the hand-written ones, and what each makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.emulators.cuda.flash2 import Document, Scores, check
from tests.emulators.rocm import ck, stack


class MemoryFault(BaseException):
    """The device faults and the process dies: no caller catches it."""


@dataclass(frozen=True)
class Asked:
    """One forward call below aiter's Python: everything but q, k, v and where their documents lie."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    bias: torch.Tensor | None
    max_q: int
    max_k: int
    padded: bool  #: boundaries of the padded kind were given
    above: int  #: min_seqlen_q: documents of at most so many queries are skipped
    block_table: torch.Tensor | None = None
    packed: bool = False

    @property
    def scores(self) -> Scores:
        """As numbers for the kernel."""
        return Scores(self.scale, self.causal, *self.window, self.softcap)

    @property
    def sides(self) -> tuple[int, int]:
        """The window as the package's Python normalises it."""
        left, right = self.window
        return (-1 if left >= self.max_k else left, -1 if right >= self.max_k else right)


def hand_written(q: torch.Tensor, v: torch.Tensor, asked: Asked) -> bool:
    """Whether the package sends the call to its hand-written kernels."""
    machine = stack.now()
    build, widths = machine.build, (q.shape[-1], v.shape[-1])
    fits = widths == (128, 128) or (widths == (192, 128) and machine.arch in build.asm_192)
    return (
        q.dtype == torch.bfloat16
        and fits
        and asked.bias is None
        and not asked.padded
        and max(asked.sides) <= 0
        and (asked.packed or asked.max_q > 128)
        and machine.chip.aiter_asm
        and not (asked.softcap and build.asm_reads_softcap)
    )


def run(
    q: torch.Tensor, v: torch.Tensor, parts: list[Document], asked: Asked, out: torch.Tensor
) -> tuple[torch.Tensor, Scores]:
    """The forward of packed q [T,H,D] into out [T,H,Dv]; its LSE [H,T], and the scores that were really computed."""
    scores = asked.scores
    by_hand = hand_written(q, v, asked)
    if by_hand:
        scores = _by_hand(asked, scores)
    check(by_hand or stack.now().chip.aiter_ck, f"no kernel image for {stack.now().arch}")
    lse = ck.forward(q, parts, scores, asked.max_q, asked.max_k, out, bias=asked.bias, above=asked.above)
    if not by_hand and asked.packed and asked.max_q == 1 and asked.block_table is None:
        _decode(out)
    return lse, scores


def _by_hand(asked: Asked, scores: Scores) -> Scores:
    name = "fmha_v3_varlen_fwd" if asked.packed else "fmha_v3_fwd"
    left, right = asked.sides
    causal = asked.causal and asked.max_q != 1
    right = 0 if causal else right
    check((left, right) in ((-1, -1), (-1, 0)), f"invalid argument for {name}: window ({left}, {right})")
    if asked.block_table is not None:
        # ROCm/aiter issue 4455: the table is checked and left behind, the pool is read as rows
        text = f"{name} reads paged keys as rows of a packed tensor"
        stack.lints.append(text)
        raise MemoryFault(f"Memory access fault by GPU node: {text}")
    if asked.softcap:
        stack.silent(f"{name} does not read logits_soft_cap={asked.softcap}")
        return Scores(scores.scale, scores.causal, scores.left, scores.right, 0.0)
    return scores


def _decode(out: torch.Tensor) -> None:
    """ROCm/aiter issue 2229: CK's packed kernels with one query a document answer nonsense, finite and large."""
    if stack.now().chip.decode_fault:
        stack.silent(f"mha_varlen_fwd with max_seqlen_q 1 is wrong on {stack.now().arch}")
        out.mul_(-64.0).add_(1.0)
