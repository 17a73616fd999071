"""The two kernels under `varlen_fwd` by their contract: prefill over documents, decode of one query row a document.

Hidden scores are -inf before the scale; a row that sees nothing is NaN, its LSE -inf; what a row hides still enters the
product with V by weight 0, as far as the last tile of keys reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.emulators.cuda.numerics import attend, band

NAN = float("nan")


@dataclass(frozen=True)
class Scores:
    """How scores are made and hidden; a side below 0 is unbounded, `tile` is the keys that one step takes."""

    scale: float
    causal: bool
    left: int
    right: int
    tile: int
    sink: torch.Tensor | None = None

    @property
    def local(self) -> bool:
        """Whether a window runs, which has kernels of its own."""
        return self.left != -1 or self.right != -1

    def within(self, max_k: int) -> Scores:
        """A window's unbounded side becomes the stated longest document, its causal a right side of 0."""
        if not self.local:
            return self
        left, right = (max_k if side == -1 else side for side in (self.left, self.right))
        return Scores(self.scale, False, left, 0 if self.causal else right, self.tile, self.sink)


@dataclass(frozen=True)
class Keys:
    """A document's keys and values [Sk,Hk,D]; `beyond` is what its last tile takes behind them."""

    k: torch.Tensor
    v: torch.Tensor
    beyond: torch.Tensor


def prefill(q: torch.Tensor, keys: Keys, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Sq,H,D] -> out [Sq,H,D], lse [H,Sq], in float64."""
    right = 0 if scores.causal else scores.right if scores.local else -1
    seen = band(q.shape[0], keys.k.shape[0], scores.left if scores.local else -1, right)
    if scores.local:  # both sides are bounds by now, also a right one that lies before the first key
        row = torch.arange(q.shape[0])[:, None] + keys.k.shape[0] - q.shape[0]
        place = torch.arange(keys.k.shape[0])
        seen = (place >= row - scores.left) & (place <= row + scores.right)
    return _attend(q, keys, seen, scores)


def decode(q: torch.Tensor, keys: Keys, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """q [1,H,D] at the last position; a right side has no effect."""
    count = keys.k.shape[0]
    first = max(count - 1 - scores.left, 0) if scores.local else 0
    seen = (torch.arange(count) >= first)[None]
    return _attend(q, keys, seen, scores)


def _attend(q: torch.Tensor, keys: Keys, seen: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(q, keys.k, keys.v, seen, scale=scores.scale)
    if scores.sink is not None:
        total = torch.logaddexp(lse, scores.sink.double()[:, None])
        out, lse = out * (lse - total).exp().T[..., None], total
    else:
        out = out.masked_fill(lse.isneginf().T[..., None], NAN)  # 0 * (1 / 0)
    if not keys.beyond.isfinite().all():
        out = torch.full_like(out, NAN)
    if scores.scale <= 0.0:  # a hidden score is NaN or +inf once it is scaled
        hidden = ~seen.all(-1) | (keys.k.shape[0] % scores.tile != 0)
        out, lse = out.masked_fill(hidden[:, None, None], NAN), lse.masked_fill(hidden, NAN)
    return out, lse
