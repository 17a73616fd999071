"""What all structures share: frozen, compared by identity, one bounded cache of derived data per device."""

from __future__ import annotations

import os
from functools import cached_property
from itertools import count
from threading import RLock
from typing import Any, ClassVar, NoReturn

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.anchors import handle_of, versions
from polyattn.structures.host_data import on_host
from polyattn.structures.lasting import lasting, normal
from polyattn.structures.transfer import is_capturing

#: Devices a structure serves, and (device, q shape, k shape) of the calls that share it; the oldest are dropped.
_PREPARED_LIMIT = 32
_BOUND_LIMIT = 64
_ROUTE_KEY_LIMIT = 4096

#: Held while a structure derives or a cache changes; never by another thread across a fork.
deriving = RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=deriving.acquire, after_in_parent=deriving.release, after_in_child=deriving.release)
_route_keys: dict[Any, int] = {}
_new_route_key = count(1).__next__


class Meta:
    """What a structure derives for one device; slots receive it."""

    def complete(self) -> None:
        """Derive now what would otherwise be derived on first use."""


class Structure:
    """Who may attend to whom. Subclasses state `kind`, `facts`, `check` and `prepare`.

    A structure is built once per step and shared by every layer: `bind` checks it against the shapes of a call and
    returns the data derived for the device, both only once. `builds` counts the derivations.
    """

    kind: ClassVar[str] = ""
    facts: StructureFacts
    builds: int
    handle: torch.Tensor | None
    _prepared: dict[Any, Any]
    _bound: dict[Any, Any]
    _parts: dict[Any, Any]
    _versions: tuple[int | None, ...]

    def _freeze(self, **fields: Any) -> None:
        """Set the fields; afterwards the object refuses assignment."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for name, value in (("_prepared", {}), ("_bound", {}), ("_parts", {}), ("builds", 0)):
            object.__setattr__(self, name, value)
        if torch.compiler.is_compiling():  # nothing outlives the trace: the graph carries the anchors
            object.__setattr__(self, "handle", None)
            return
        self._settle_versions()
        object.__setattr__(self, "handle", handle_of(self))

    def _settle_versions(self) -> None:
        object.__setattr__(self, "_versions", versions(self.anchors()))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name!r}; build a new structure")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot delete {name!r}; build a new structure")

    def __getstate__(self) -> dict[str, Any]:
        kept = {}
        for name, value in self.__dict__.items():
            derived = name.startswith("_") or name in ("builds", "handle")
            if not derived and not isinstance(getattr(type(self), name, None), cached_property):
                kept[name] = value
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {id(value): normal(value) for value in state.values() if isinstance(value, torch.Tensor)}
        self._freeze(**{name: tensors.get(id(value), value) for name, value in state.items()})

    def __copy__(self) -> Structure:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        return self

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        """Raise ValueError if tensors of these shapes (of the right rank) do not fit; reads no tensor."""

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> Meta | None:
        """Derive what slots need on `device` (their `meta`)."""
        return None

    def preparation_key(self, device: torch.device, k_shape: tuple[int, ...]) -> Any:
        """What `prepare` depends on."""
        return device

    def route_facts(self) -> Any:
        """Everything of this structure that a route may depend on, hashable."""
        return self.kind, self.facts

    @property
    def parts(self) -> dict[Any, Any]:
        """What ranks that share a sequence derive of this structure; written by `keep`, so that it stays bounded."""
        return self._parts

    @cached_property
    def route_key(self) -> int:
        """A number that structures share exactly when they are routed alike, in this process."""
        facts = self.route_facts()
        with deriving:
            if facts not in _route_keys:
                keep(_route_keys, _ROUTE_KEY_LIMIT, facts, _new_route_key())
            return _route_keys[facts]

    def anchors(self) -> tuple[torch.Tensor, ...]:
        """All that this structure is, as at most four tensors: inside a compiled graph they stand for it."""
        return ()

    def anchor_ints(self) -> tuple[int, ...]:
        """At most two integers that `from_anchors` needs beside the tensors."""
        return ()

    def anchor_detail(self) -> str:
        """A static word that `from_anchors` needs (part of the graph's guards)."""
        return ""

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Structure:
        """Rebuild from `anchors()`, for a structure made inside a compiled graph."""
        raise TypeError(f"{cls.__name__} cannot be built inside a compiled graph; build it outside and pass it in")

    def stale(self) -> bool:
        """Whether an anchor was written in place since, so that what was derived from it may be wrong."""
        return versions(self.anchors()) != self._versions

    def bind(
        self, device: torch.device, q_shape: tuple[int, ...], k_shape: tuple[int, ...], capturing: bool = False
    ) -> Any:
        """The `meta` for a call of these shapes on `device`; checked and derived on first use only."""
        key = (device, q_shape, k_shape)
        try:
            return self._bound[key]
        except KeyError:
            pass
        self.check(q_shape, k_shape)
        with deriving:
            meta = self._prepare_once(device, k_shape, capturing)
            if _is_real():
                keep(self._bound, _BOUND_LIMIT, key, meta)
        return meta

    @lasting
    def to(self, device: torch.device | str) -> Structure:
        """Send everything this structure derives to `device` ahead of its first use there; returns itself."""
        target = torch.device(device)
        if target.type not in ("cpu", "meta") and target.index is None:
            target = torch.empty(0, device=target).device
        with deriving:
            meta = self._prepare_once(target, (), False)
            if meta is not None:
                meta.complete()
        return self

    @lasting
    def _prepare_once(self, device: torch.device, k_shape: tuple[int, ...], capturing: bool) -> Any:
        key = self.preparation_key(device, k_shape)
        if key in self._prepared:
            return self._prepared[key]
        if capturing or is_capturing(device):
            raise RuntimeError(
                f"{type(self).__name__} is used for the first time inside a graph capture, where nothing can be "
                f"sent to {device}: call structure.to({str(device)!r}) before the capture"
            )
        meta = self.prepare(device, k_shape)
        object.__setattr__(self, "builds", self.builds + 1)
        if _is_real():
            keep(self._prepared, _PREPARED_LIMIT, key, meta)
        return meta


def _is_real() -> bool:
    """False under a fake tensor mode, whose tensors must not be found by a later real call."""
    return on_host(torch.empty(0, device="cpu"))


def keep(cache: dict[Any, Any], limit: int, key: Any, value: Any) -> None:
    """Remember `value`, and drop the oldest where the cache is full."""
    with deriving:
        if key not in cache and len(cache) >= limit:
            del cache[next(iter(cache))]
        cache[key] = value
