"""What all structures share: frozen, compared by identity, one bounded cache of derived data per device."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, NoReturn

import torch

from polyattn.door.request import StructureFacts

#: A structure serves a handful of devices and layer shapes at once; beyond that the oldest entry is dropped.
_PREPARED_LIMIT = 8
_BOUND_LIMIT = 32

_by_anchor: dict[int, weakref.ref[Structure]] = {}


class Structure:
    """Who may attend to whom. Subclasses state `kind`, `facts`, `check` and `prepare`.

    A structure is built once per step and shared by every layer: `bind` checks it against the shapes of a call and
    returns the data derived for the device, both only once.
    """

    kind: ClassVar[str] = ""
    facts: StructureFacts
    route_key: tuple[Any, ...]
    _prepared: dict[Any, Any]
    _bound: dict[Any, Any]
    builds: int

    def _freeze(self, **fields: Any) -> None:
        """Set the fields; afterwards the object refuses assignment."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        # a flat tuple of plain values hashes faster than the facts themselves, and every call hashes it
        object.__setattr__(self, "route_key", (self.kind, *vars(self.facts).values()))
        for name, value in (("_prepared", {}), ("_bound", {}), ("builds", 0)):
            object.__setattr__(self, name, value)
        for anchor in self.anchors()[:1]:
            _remember(anchor, self)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name!r}; build a new structure")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name[0] != "_" and name not in ("builds", "route_key")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._freeze(**state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        memo[id(self)] = self
        return self

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        """Raise ValueError if tensors of these shapes do not fit; reads no tensor."""

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> Any:
        """Derive what slots need on `device` (their `meta`)."""
        return None

    def preparation_key(self, device: torch.device, k_shape: tuple[int, ...]) -> Any:
        """What `prepare` depends on."""
        return device

    def anchors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that stand for this structure inside a compiled graph, at most three."""
        return ()

    def anchor_ints(self) -> tuple[int, ...]:
        """At most two integers that `from_anchors` needs beside the tensors."""
        return ()

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Structure:
        """Rebuild from `anchors()`, for a structure made inside a compiled graph."""
        raise TypeError(f"{cls.__name__} cannot be built inside a compiled graph; build it outside and pass it in")

    def anchor_detail(self) -> str:
        """A static word that `from_anchors` needs (part of the graph's guards)."""
        return ""

    def bind(self, device: torch.device, q_shape: tuple[int, ...], k_shape: tuple[int, ...], capturing: bool = False) -> Any:
        """The `meta` for a call of these shapes on `device`; checked and derived on first use only."""
        key = (device, q_shape, k_shape)
        try:
            return self._bound[key]
        except KeyError:
            pass
        self.check(q_shape, k_shape)
        meta = self._prepare_once(device, k_shape, capturing)
        if len(self._bound) >= _BOUND_LIMIT:
            self._bound.pop(next(iter(self._bound)), None)
        self._bound[key] = meta
        return meta

    def to(self, device: torch.device | str) -> Structure:
        """Send everything this structure derives to `device` ahead of its first use there; returns itself."""
        target = torch.device(device)
        if target.type != "cpu" and target.index is None:
            target = torch.empty(0, device=target).device
        self._prepare_once(target, (), False)
        return self

    def _prepare_once(self, device: torch.device, k_shape: tuple[int, ...], capturing: bool) -> Any:
        key = self.preparation_key(device, k_shape)
        if key not in self._prepared:
            if capturing:
                raise RuntimeError(
                    f"{type(self).__name__} is used for the first time inside a graph capture, where nothing can be "
                    f"sent to {device}: call structure.to({str(device)!r}) before the capture"
                )
            object.__setattr__(self, "builds", self.builds + 1)
            if len(self._prepared) >= _PREPARED_LIMIT:
                self._prepared.pop(next(iter(self._prepared)), None)
            self._prepared[key] = self.prepare(device, k_shape)
        return self._prepared[key]


def _remember(anchor: torch.Tensor, structure: Structure) -> None:
    key = id(anchor)
    _by_anchor[key] = weakref.ref(structure, lambda _: _by_anchor.pop(key, None))


def from_anchor(anchor: torch.Tensor) -> Structure | None:
    """The living structure that this very tensor stands for; compiled graphs hand tensors, never objects."""
    reference = _by_anchor.get(id(anchor))
    structure = reference() if reference is not None else None
    return structure if structure is not None and structure.anchors()[0] is anchor else None
