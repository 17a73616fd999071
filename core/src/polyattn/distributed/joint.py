"""Joint and Replicated: tokens that every rank holds, beside the sequence that is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, eq=False)
class Joint:
    """Tokens q, k, v glued before ("front") or after ("rear") the sequence; the output is the glued sequence.

    q, k, v are [B,J,H,D]; q may have no rows, for keys and values alone. `split` undoes the glue.

    >>> import torch, polyattn as pa
    >>> text, image = torch.randn(1, 3, 2, 8), torch.randn(1, 5, 2, 8)
    >>> joint = pa.Joint(text, text, text, where="front")
    >>> out = pa.attention(image, image, image, joint=joint)
    >>> [part.shape[1] for part in joint.split(out)]
    [3, 5]
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    where: Literal["front", "rear"] = "front"

    def __post_init__(self) -> None:
        if self.where not in ("front", "rear"):
            raise ValueError(f"joint.where: 'front' or 'rear' is accepted, got {self.where!r}")
        for name in ("q", "k", "v"):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                raise TypeError(f"joint.{name}: a tensor [B,J,H,D] is needed, got {_what(tensor)}")
        if self.k.shape[1] != self.v.shape[1]:
            raise ValueError(f"joint: k has {self.k.shape[1]} rows and v {self.v.shape[1]}")

    def split(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(joint rows, sequence rows) of the glued output [B,S,H,D], as views."""
        rows = self.q.shape[1]
        if self.where == "front":
            return out[:, :rows], out[:, rows:]
        return out[:, out.shape[1] - rows :], out[:, : out.shape[1] - rows]


@dataclass(frozen=True, eq=False)
class Replicated:
    """Rows that every rank holds: a prefix and a suffix of the sequence, or a prefix of keys and values alone.

    Each is a row count, for rows that are part of the tensors already, or the tensors given apart: (q, k, v) for
    `prefix` and `suffix`, (k, v) for `kv_prefix`. `kv=True`: K and V are complete on every rank.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> pa.attention(q, q, q, replicated=pa.Replicated(prefix=(q, q, q))).shape
    torch.Size([1, 8, 2, 8])
    """

    prefix: Any = None
    suffix: Any = None
    kv_prefix: Any = None
    kv: bool = False

    def __post_init__(self) -> None:
        for name, parts in (("prefix", 3), ("suffix", 3), ("kv_prefix", 2)):
            _check_rows(name, getattr(self, name), parts)
        if not isinstance(self.kv, bool):
            raise TypeError(f"replicated.kv: True or False is needed, got {_what(self.kv)}")
        if self.prefix is not None and self.kv_prefix is not None:
            raise ValueError("replicated: prefix and kv_prefix cannot both lead the keys; give one")


def _check_rows(name: str, given: Any, parts: int) -> None:
    if given is None:
        return
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 0:
            raise ValueError(f"replicated.{name}: a row count cannot be negative, got {given}")
        return
    if (
        not isinstance(given, (tuple, list))
        or len(given) != parts
        or not all(isinstance(t, torch.Tensor) for t in given)
    ):
        wanted = "(q, k, v)" if parts == 3 else "(k, v)"
        raise TypeError(f"replicated.{name}: a row count or tensors {wanted} are needed, got {_what(given)}")


def _what(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"[:80]
