"""Named shapes of real models, each at full size and scaled down for a processor, with the work that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from polyattn.structures import KeyPadding, Packed, Paged, Spans, Structure
from polyattn.structures.spans import segments_of


@dataclass(frozen=True)
class Workload:
    """The tensors of one call, and how many (query, key) pairs of one head are visible in it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    structure: Structure | None
    pairs: int
    causal: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over all query heads."""
        return 2 * self.pairs * self.q.shape[-2] * (self.q.shape[-1] + self.v.shape[-1])


Recipe = Callable[[torch.device, torch.dtype], Workload]


@dataclass(frozen=True)
class Shape:
    """A named shape: what it is, and how to make it at full size and small."""

    title: str
    full: Recipe
    small: Recipe


def dense(batch: int, rows: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Workload:
    """Self-attention of equal rows."""
    return Workload(*_qkv((batch, rows, heads, dim), device, dtype), None, batch * rows * rows)


def causal(rows: int, heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Workload:
    """One prompt of a language model, with fewer KV heads."""
    q = torch.randn(1, rows, heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(1, rows, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    return Workload(q, k, v, None, rows * (rows + 1) // 2, causal=True)


def padded(lengths: Sequence[int], heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Workload:
    """A padded batch whose rows keep a prefix; the first is full."""
    rows = max(lengths)
    structure = KeyPadding.from_lengths(lengths, rows)
    return Workload(*_qkv((len(lengths), rows, heads, dim), device, dtype), structure, sum(n * n for n in lengths))


def documents(lengths: Sequence[int], heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Workload:
    """Packed documents."""
    structure = Packed.from_lengths(lengths)
    return Workload(*_qkv((sum(lengths), heads, dim), device, dtype), structure, sum(n * n for n in lengths))


def text_and_images(
    text: int, image: int, times: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype
) -> Workload:
    """Causal text, then an image in full, so many times."""
    each, rows = text + image, (text + image) * times
    full = [(part * each + text, (part + 1) * each) for part in range(times)]
    pairs = 0
    for start, end, kv_end, causal in segments_of(tuple(full), None, rows, rows):
        count = end - start
        pairs += count * kv_end - (count * (count - 1) // 2 if causal else 0)
    return Workload(*_qkv((1, rows, heads, dim), device, dtype), Spans([full]), pairs)


def paged(
    page: int, requests: int, keys: int, new: int, heads: int, kv_heads: int, dim: int,
    device: torch.device, dtype: torch.dtype,
) -> Workload:  # fmt: skip
    """Requests with a cache in scattered pages and so many new queries each, the last positions."""
    pages = -(-keys // page)
    order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0))
    structure = Paged(order.view(requests, pages).tolist(), [keys] * requests)
    q = torch.randn(requests, new, heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(requests * pages, page, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    return Workload(q, k, v, structure, requests * new * keys)


def _qkv(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v


def _paged(page: int) -> Shape:
    return Shape(
        f"8 requests of 4096 keys in pages of {page}, 64 new queries each, 24 heads on 8 KV heads, D 128",
        partial(paged, page, 8, 4096, 64, 24, 8, 128),
        partial(paged, page, 2, 512, 16, 4, 2, 64),
    )


SHAPES: dict[str, Shape] = {
    "flux": Shape(
        "FLUX, 4608 tokens, 24 heads, D 128", partial(dense, 1, 4608, 24, 128), partial(dense, 1, 576, 4, 64)
    ),
    "sd3": Shape(
        "SD3, 4096 tokens of image and 154 of text, two samples, 24 heads, D 64",
        partial(dense, 2, 4250, 24, 64),
        partial(dense, 2, 425, 4, 64),
    ),
    "hunyuan": Shape(
        "HunyuanVideo 720p, 118800 tokens of video and 256 of text, 24 heads, D 128",
        partial(dense, 1, 119056, 24, 128),
        partial(dense, 1, 1860, 4, 64),
    ),
    "prefill": Shape(
        "a prompt of 8192 tokens, causal, 32 heads on 8 KV heads, D 128",
        partial(causal, 8192, 32, 8, 128),
        partial(causal, 512, 4, 1, 64),
    ),
    "wan480": Shape(
        "Wan 480p, 32760 tokens, 40 heads, D 128", partial(dense, 1, 32760, 40, 128), partial(dense, 1, 1023, 4, 64)
    ),
    "wan720": Shape(
        "Wan 720p, 75600 tokens, 40 heads, D 128", partial(dense, 1, 75600, 40, 128), partial(dense, 1, 1575, 4, 64)
    ),
    "padded": Shape(
        "a padded batch, 4608 and 4200 of 4608 kept, 24 heads, D 128",
        partial(padded, (4608, 4200), 24, 128),
        partial(padded, (576, 525), 4, 64),
    ),
    "padded64": Shape(
        "a padded batch, 4250, 4150, 4110 and 4100 of 4250 kept, 24 heads, D 64",
        partial(padded, (4250, 4150, 4110, 4100), 24, 64),
        partial(padded, (425, 415, 411, 410), 4, 64),
    ),
    "documents": Shape(
        "documents of 20000 and 12760 tokens, 40 heads, D 128",
        partial(documents, (20000, 12760), 40, 128),
        partial(documents, (625, 398), 4, 64),
    ),
    "spans": Shape(
        "512 tokens of text (causal) and 4096 of image (full), twice, 24 heads, D 128",
        partial(text_and_images, 512, 4096, 2, 24, 128),
        partial(text_and_images, 64, 256, 2, 4, 64),
    ),
    **{f"paged{page}": _paged(page) for page in (16, 64, 128, 256)},
    "tiny": Shape("64 tokens, 2 heads, D 64", partial(dense, 1, 64, 2, 64), partial(dense, 1, 64, 2, 64)),
}


def workload_of(name: str, device: torch.device, dtype: torch.dtype, *, small: bool) -> Workload:
    """The workload of this name, with random content."""
    shape = SHAPES[name]
    return (shape.small if small else shape.full)(device, dtype)
