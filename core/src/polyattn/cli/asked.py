"""From shapes on a command line to a request: tensors without data, and a plausible structure of the kind asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from polyattn.arguments import checked
from polyattn.cli.failure import UsageError
from polyattn.errors import UnsupportedRequest
from polyattn.plan import describe
from polyattn.quant import Quant
from polyattn.structures import (
    BlockMap,
    KeyPadding,
    Mask,
    Packed,
    Paged,
    Spans,
    Structure,
    VideoLayout,
    VideoTiles,
)
from polyattn.structures.video_gate import gated
from polyattn.vendor import Request

Shape = tuple[int, ...]

_PAGE_SIZE = 16
_DOCUMENTS = 2
_BLOCK = 64
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True)
class Asked:
    """What the user asks about. k None: q's shape (paged: a pool that holds one key a query); v None: k's."""

    q: Shape
    k: Shape | None = None
    v: Shape | None = None
    dtype: str = "bfloat16"
    structure: str = "dense"
    documents: int | None = None
    grid: Shape | None = None
    tile: Shape = (4, 4, 4)
    sparsity: float = 0.9
    gate: bool = False
    causal: bool = False
    window: Any = None
    softcap: float = 0.0
    lse: bool = False
    grad: bool = False
    deterministic: bool = False
    quant: str | None = None


def request_of(asked: Asked, device: str) -> tuple[Request, tuple[str, ...]]:
    """The request on `device`, and what had to be assumed for it; UsageError where no call could look like that."""
    dtype = _dtype(asked.dtype)
    _check_shapes(asked)
    k_shape = asked.k or _default_k(asked)
    try:
        structure, assumed = _structure(asked, k_shape, dtype)
        q, k, v = (_empty(shape, dtype) for shape in (asked.q, k_shape, asked.v or k_shape))
        if asked.gate:
            structure = gated(structure, _empty((*asked.q[:-1], v.shape[-1]), dtype), q, k, v)
        arguments = checked(asked.causal, asked.window, asked.softcap, asked.deterministic, ())
        quant = None if asked.quant is None else Quant(asked.quant)
        request, _, _ = describe(q, k, v, structure, arguments, scale=None, lse=asked.lse, out=None, quant=quant)
    except UnsupportedRequest:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: sizes beyond what torch can count
        raise UsageError(str(error).partition("\n")[0]) from error
    return replace(request, device=device, grad=asked.grad), assumed


def _structure(asked: Asked, k_shape: Shape, dtype: torch.dtype) -> tuple[Structure | None, tuple[str, ...]]:
    if asked.structure == "dense":
        return None, ()
    structure, assumed = _MAKERS[asked.structure](asked, k_shape, dtype)
    return structure, (assumed,)


def _key_padding(asked: Asked, k: Shape, _: torch.dtype) -> tuple[Structure, str]:
    rows, keys = k[:2]
    lengths = [keys - keys * (row + 1) // (2 * rows) for row in range(rows)]  # down to half
    structure = KeyPadding.from_lengths(lengths, keys, queries="same" if asked.q[1] == keys else "all")
    return structure, f"row lengths {_listed(lengths)}, known on the host; queries={structure.queries!r}"


def _mask(asked: Asked, k: Shape, dtype: torch.dtype) -> tuple[Structure, str]:
    shape = (asked.q[0], 1, asked.q[1], k[1])
    structure = Mask(_empty(shape, dtype if asked.structure == "bias" else torch.bool))
    return structure, f"a {structure.facts.mask_dtype} mask of {list(shape)} that is on the device"


def _packed(asked: Asked, k: Shape, _: torch.dtype) -> tuple[Structure, str]:
    documents = asked.documents or _DOCUMENTS
    rows_q, rows_k = (_shares(shape[-3], documents) for shape in (asked.q, k))
    structure = Packed.from_lengths(rows_q, None if rows_k == rows_q else rows_k)
    of_keys = "" if rows_k == rows_q else f" and {_listed(rows_k)} keys"
    return structure, f"documents of {_listed(rows_q)} rows{of_keys}, known on the host"


def _spans(asked: Asked, k: Shape, _: torch.dtype) -> tuple[Structure, str]:
    span = (k[1] // 4, k[1] // 2)
    return Spans([[span] if span[0] < span[1] else []] * asked.q[0]), f"one full span {list(span)} in each sample"


def _paged(asked: Asked, k: Shape, _: torch.dtype) -> tuple[Structure, str]:
    rows = _paged_rows(asked)
    entries = max(k[0] // rows, 1)
    pages = [[(row * entries + entry) % k[0] for entry in range(entries)] if k[0] else [] for row in range(rows)]
    lengths = [len(row) * k[1] for row in pages]
    new = _shares(asked.q[0], rows) if len(asked.q) == 3 else None
    return Paged(pages, lengths, new), f"{rows} rows of {entries} pages, full, {k[1]} keys a page, known on the host"


def _video_tiles(asked: Asked, k: Shape, _: torch.dtype) -> tuple[Structure, str]:
    if asked.grid is None:
        raise UsageError("--grid: video tiles need the video's frames, height and width in tokens, as 21,30,52")
    beside = k[1] - prod(asked.grid)
    if beside < 0:
        raise UsageError(f"--grid: {_listed(asked.grid)} has {prod(asked.grid)} tokens, q only {k[1]} rows")
    grid: Any = asked.grid  # their own checks say what is wrong with other than three sizes
    tile: Any = asked.tile
    structure = VideoTiles(VideoLayout(grid, prefix=(beside,) if beside else ()), tile, sparsity=asked.sparsity)
    told = f"{structure.kept} of {structure.num_tiles} tiles of {_listed(asked.tile)} are kept"
    return structure, told + (f", {beside} rows before the video are a prefix" if beside else "")


def _block_map(asked: Asked, k: Shape, _: torch.dtype) -> tuple[Structure, str]:
    blocks = [-(-rows // _BLOCK) for rows in (asked.q[1], k[1])]
    kept = torch.ones(blocks, dtype=torch.bool)
    return BlockMap.from_mask(kept, _BLOCK, _BLOCK), f"blocks of {_BLOCK} rows, known on the host"


_MAKERS = {
    "key_padding": _key_padding,
    "mask": _mask,
    "bias": _mask,
    "packed": _packed,
    "spans": _spans,
    "paged": _paged,
    "video_tiles": _video_tiles,
    "block_map": _block_map,
}


def _default_k(asked: Asked) -> Shape:
    if asked.structure != "paged":
        return asked.q
    rows = _paged_rows(asked)
    keys = asked.q[1] if len(asked.q) == 4 else max(_shares(asked.q[0], rows))
    return (rows * -(-keys // _PAGE_SIZE), _PAGE_SIZE, *asked.q[-2:])


def _paged_rows(asked: Asked) -> int:
    return max(asked.q[0], 1) if len(asked.q) == 4 else asked.documents or _DOCUMENTS


def _check_shapes(asked: Asked) -> None:
    """The ranks that the structures here are made from; all else is for the call's own checks."""
    ranks, words = {
        "packed": ((3, 4), "T,H,D (or 1,T,H,D)"),
        "paged": ((3, 4), "B,S,H,D or T,H,D"),
    }.get(asked.structure, ((4,), "B,S,H,D"))
    if len(asked.q) not in ranks:
        raise UsageError(f"--q: {asked.structure} attention takes {words}, got {_listed(asked.q)}")
    rank, words = (4, "PAGES,PAGE_SIZE,H,D") if asked.structure == "paged" else (len(asked.q), words)
    for name, shape in (("k", asked.k), ("v", asked.v)):
        if shape is not None and len(shape) != rank:
            raise UsageError(f"--{name}: {asked.structure} attention with this q takes {words}, got {_listed(shape)}")
    if asked.structure != "video_tiles" and (asked.grid is not None or asked.gate):
        raise UsageError(f"--grid, --gate: only video_tiles has them, not {asked.structure}")
    counted = asked.structure == "packed" or (asked.structure == "paged" and len(asked.q) == 3)
    if asked.documents is not None and not counted:
        raise UsageError(
            f"--documents: only packed attention, or paged with q of T,H,D, has them, not {asked.structure}"
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"--dtype: a floating dtype of torch is needed, as bfloat16, float16, float32; got {name!r}")
    return dtype


def _empty(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _shares(total: int, parts: int) -> list[int]:
    """Parts as equal as they can be."""
    whole, rest = divmod(total, parts)
    return [whole + (part < rest) for part in range(parts)]


def _listed(numbers: Any) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:5], "...", shown[-1]])
