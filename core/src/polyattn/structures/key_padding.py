"""KeyPadding: some keys of a row are padding that nobody may see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import Any, ClassVar, Literal

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Meta, Structure, deriving
from polyattn.structures.host_data import boundaries, host_tensor, integer, integer_tensor, lengths_of, on_host
from polyattn.structures.intervals import Intervals, intervals_of
from polyattn.structures.lasting import lasting, normal
from polyattn.structures.transfer import refuse_in_capture, send

Queries = Literal["same", "all"]
Ranges = tuple[Intervals, ...]


class KeyPadding(Structure):
    """Key j of row b is visible iff it is kept; built by `from_lengths`, `from_mask` or `from_ranges`.

    queries="same": q and k are the same tokens (Sq == Sk) and padded query rows return 0. "all": every query row is
    kept. Not stated, it is "same", and "all" in a layer of role "cross".

    >>> import torch, polyattn as pa
    >>> q = torch.randn(2, 4, 2, 8)
    >>> out = pa.attention(q, q, q, structure=pa.KeyPadding.from_lengths([4, 2], 4))
    >>> bool(out[1, 2:].eq(0).all())
    True
    """

    kind: ClassVar[str] = "key_padding"
    keep: torch.Tensor
    host: HostKeep | None
    queries: Queries | None
    _twins: dict[str, KeyPadding]

    def __init__(self, *given: Any, **named: Any) -> None:
        raise TypeError("KeyPadding is built by KeyPadding.from_lengths, .from_mask or .from_ranges")

    @classmethod
    def _build(
        cls, keep: torch.Tensor, host: HostKeep | None, queries: Queries | None, prefix: bool | None = None
    ) -> KeyPadding:
        if queries not in ("same", "all", None):
            raise ValueError(f"queries: 'same' or 'all' is accepted, got {queries!r}")
        facts = StructureFacts(
            host=host is not None,
            documents=keep.shape[0],
            queries=queries,
            prefix=prefix if host is None else host.prefix,
            common_prefix=None if host is None else host.common_prefix,
            mask_shape=(keep.shape[0], 1, 1, keep.shape[1]),
            mask_dtype="bool",
        )
        structure = cls.__new__(cls)
        structure._freeze(keep=keep, host=host, queries=queries, facts=facts)
        return structure

    def _freeze(self, **fields: Any) -> None:
        super()._freeze(**fields)
        # a layer of role "cross" asks for this one, and a graph that it is compiled into can only find it here
        asked = self.queries is None and not torch.compiler.is_compiling()
        object.__setattr__(self, "_twins", {"all": self._twin("all")} if asked else {})

    @classmethod
    @lasting
    def from_lengths(
        cls, lengths: Any, max_len: int, *, queries: Queries | None = None, check: bool = False
    ) -> KeyPadding:
        """Row b keeps its first `lengths[b]` of `max_len` keys. A device tensor [B] is trusted unless `check`."""
        width = integer("max_len", max_len)
        if not on_host(lengths) and not check:
            given = integer_tensor("lengths", lengths, 1, "[B]")
            return cls._build(torch.arange(width, device=given.device) < given.unsqueeze(1), None, queries, prefix=True)
        values = lengths_of("lengths", lengths, "[B]")
        if max(values, default=0) > width:
            row = next(row for row, length in enumerate(values) if length > width)
            raise ValueError(f"lengths: row {row} has {values[row]} keys, more than max_len {width}")
        keep = torch.arange(width, device="cpu") < torch.tensor(values, dtype=torch.int64, device="cpu")[:, None]
        return cls._build(keep, HostKeep(keep, values, True, tuple(map(_prefix, values))), queries)

    @classmethod
    @lasting
    def from_mask(cls, mask: Any, *, queries: Queries | None = None, check: bool = False) -> KeyPadding:
        """From a bool or integer mask [B,Sk], nonzero = kept.

        A device mask is never read on the host unless `check`, which lets routes know the padding.
        """
        given = host_tensor("mask", mask)
        if given.dim() != 2:
            raise ValueError(f"mask: shape [B, Sk] is needed, got {list(given.shape)}; other masks are pa.Mask's")
        if given.dtype.is_floating_point or given.dtype.is_complex:
            raise TypeError(
                f"mask: bool or integer (nonzero = kept) is needed, got {given.dtype}; additive masks are pa.Mask's"
            )
        given = given.detach()
        keep = given.clone() if given.dtype == torch.bool else given != 0
        if not on_host(given) and not check:
            return cls._build(keep, None, queries)
        host = _read(keep.cpu())
        return cls._build(host.keep, host, queries)

    @classmethod
    @lasting
    def from_ranges(cls, ranges: Any, max_len: int, *, queries: Queries | None = None) -> KeyPadding:
        """Row b keeps the half-open `ranges[b]`, sorted and disjoint, within `max_len`; host data."""
        width = integer("max_len", max_len)
        rows = tuple(map(_merged, intervals_of("ranges", ranges)))
        keep = torch.zeros(len(rows), width, dtype=torch.bool, device="cpu")
        for row, pairs in enumerate(rows):
            if pairs and pairs[-1][1] > width:
                raise ValueError(f"ranges[{row}]: {pairs[-1]} ends past max_len {width}")
            for start, end in pairs:
                keep[row, start:end] = True
        lengths = tuple(sum(end - start for start, end in pairs) for pairs in rows)
        prefix = all(pairs == _prefix(length) for pairs, length in zip(rows, lengths, strict=True))
        return cls._build(keep, HostKeep(keep, lengths, prefix, rows), queries)

    @property
    def ranges(self) -> Ranges | None:
        """Kept half-open ranges of each row, when the host knows them."""
        return None if self.host is None else self.host.ranges

    def with_queries(self, queries: Queries) -> KeyPadding:
        """The same kept keys with the query rule stated; the same object each time."""
        if self.queries == queries:
            return self
        twin = self._twins.get(queries)
        if twin is not None or torch.compiler.is_compiling():
            return self._twin(queries) if twin is None else twin
        with deriving:
            if queries not in self._twins:
                self._twins[queries] = self._twin(queries)
            return self._twins[queries]

    def _twin(self, queries: Queries) -> KeyPadding:
        return self._build(self.keep, self.host, queries, self.facts.prefix)

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        batch, keys = self.keep.shape
        if k_shape[0] != batch or k_shape[1] != keys:
            raise ValueError(f"structure: KeyPadding is for k of [B={batch}, Sk={keys}], got k {list(k_shape)}")
        if self.queries != "all" and q_shape[1] != keys:
            raise ValueError(
                f"structure: KeyPadding(queries='same') needs as many queries as keys, got Sq={q_shape[1]} and "
                f"Sk={keys}; queries='all' keeps every query row (cross attention)"
            )

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> KeyPaddingMeta:
        return KeyPaddingMeta(
            send(self.keep, device), self.queries or "same", self.facts.prefix, self.facts.common_prefix, self.host
        )

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.keep,)

    def anchor_detail(self) -> str:
        return self.queries or ""

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> KeyPadding:
        return cls.from_mask(tensors[0], queries=detail or None)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"KeyPadding({self.keep.shape[0]} rows of {self.keep.shape[1]}, queries={self.queries!r})"


@dataclass(frozen=True, eq=False)
class HostKeep:
    """What the host knows of a padding, shared by all devices.

    keep [B,Sk] bool; kept keys of each row; whether every row keeps a prefix of its keys; the ranges, where stated.
    """

    keep: torch.Tensor
    lengths: tuple[int, ...]
    prefix: bool
    stated: Ranges | None

    @property
    def common_prefix(self) -> int | None:
        """The one prefix that all rows keep."""
        return self.lengths[0] if self.prefix and len(set(self.lengths)) == 1 else None

    @cached_property
    def ranges(self) -> Ranges:
        """Kept half-open ranges of each row, the longest there are."""
        return _ranges_of(self.keep) if self.stated is None else self.stated

    @cached_property
    @lasting
    def indices(self) -> torch.Tensor:
        """Flat positions b*Sk+j of the kept keys [nnz] int64."""
        if self.stated is None:
            return self.keep.flatten().nonzero().squeeze(1)
        # from numbers alone, so that fake tensors do
        width, total = self.keep.shape[1], sum(self.lengths)
        starts = [row * width + start for row, pairs in enumerate(self.stated) for start, _ in pairs]
        sizes = [end - start for pairs in self.stated for start, end in pairs]
        before = list(accumulate(sizes, initial=0))[:-1]
        shifts = torch.tensor(list(map(sub, starts, before)), dtype=torch.int64, device="cpu")
        repeats = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        return torch.arange(total, device="cpu") + shifts.repeat_interleave(repeats, output_size=total)


@dataclass(frozen=True, eq=False)
class KeyPaddingMeta(Meta):
    """KeyPadding on one device.

    keep [B,Sk] bool; `lengths`, `ranges`, `indices` and `cu_seqlens` exist only where the host knows the padding.
    """

    keep: torch.Tensor
    queries: Queries
    prefix: bool | None
    common_prefix: int | None
    host: HostKeep | None

    def complete(self) -> None:
        _ = self.seqused
        if self.host is not None:
            _ = self.indices, self.cu_seqlens

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Kept keys of each row, when the host knows them."""
        return None if self.host is None else self.host.lengths

    @property
    def ranges(self) -> Ranges | None:
        """Kept half-open ranges of each row, when the host knows them."""
        return None if self.host is None else self.host.ranges

    @cached_property
    @lasting
    def seqused(self) -> torch.Tensor:
        """Kept keys of each row [B] int32, on the device."""
        refuse_in_capture(self.keep.device)
        return self.keep.sum(dim=1, dtype=torch.int32)

    @cached_property
    @lasting
    def indices(self) -> torch.Tensor:
        """Flat positions b*Sk+j of the kept keys [nnz] int64, on the device."""
        return normal(send(self._known().indices, self.keep.device))

    @cached_property
    @lasting
    def cu_seqlens(self) -> torch.Tensor:
        """int32 boundaries [B+1] of the rows once packed, on the device."""
        return send(boundaries(self._known().lengths), self.keep.device)

    def _known(self) -> HostKeep:
        if self.host is None:
            raise ValueError(
                "structure: packing kept keys needs lengths, ranges or a mask given on the host (or check=True)"
            )
        return self.host


def _prefix(length: int) -> Intervals:
    return ((0, length),) if length else ()


def _merged(pairs: Intervals) -> Intervals:
    merged: list[tuple[int, int]] = []
    for start, end in pairs:
        if merged and merged[-1][1] == start:
            start, _ = merged.pop()
        merged.append((start, end))
    return tuple(merged)


def _read(keep: torch.Tensor) -> HostKeep:
    counts = keep.sum(dim=1)
    prefix = torch.equal(keep, torch.arange(keep.shape[1], device="cpu") < counts[:, None])
    lengths = tuple(counts.tolist())
    return HostKeep(keep, lengths, prefix, tuple(map(_prefix, lengths)) if prefix else None)


def _ranges_of(keep: torch.Tensor) -> Ranges:
    closed = torch.nn.functional.pad(keep, (1, 1))
    changes = (closed[:, 1:] != closed[:, :-1]).nonzero().tolist()  # by row, then starts and ends in turn
    rows: list[list[tuple[int, int]]] = [[] for _ in range(keep.shape[0])]
    for (row, start), (_, end) in zip(changes[::2], changes[1::2], strict=True):
        rows[row].append((start, end))
    return tuple(map(tuple, rows))
