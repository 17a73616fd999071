"""Which attention processors of a diffusers model run through polyattn in a scope, and putting back what was there.

A processor that asks diffusers' dispatcher is told our backend; one that calls torch's SDPA itself, as SD3's and the
UNets' do, runs inside `pa.patch_sdpa`. Both are copies that stand in for the model's own while the scope lasts, so that
a processor that another model shares keeps its ways. A model that is copied or pickled meanwhile takes its own along.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from polyattn.integrations.patching import patch_sdpa

_SDPA = "scaled_dot_product_attention"
#: A processor's class, and whether it runs within `patch_sdpa` -> the class of what stands in for it.
_classes: dict[tuple[type, bool], type] = {}


@dataclass
class Routed:
    """The processors of some models by the names of their modules, while a scope lasts.

    dispatched  told to use our backend
    patched     call torch's SDPA, which is ours while they run
    left        use neither, such as linear attention: they compute as before
    """

    dispatched: tuple[str, ...]
    patched: tuple[str, ...]
    left: tuple[str, ...]


@dataclass
class _Replaced:
    """What a stand-in replaced, and whether its scope is over."""

    processor: Any
    over: bool = False


_replaced: weakref.WeakKeyDictionary[Any, _Replaced] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass
class Standin:
    """A module's processor and the copy that stands in for it."""

    module: torch.nn.Module
    copy: Any

    def put(self) -> None:
        with _lock:
            _replaced[self.copy] = _Replaced(self.module.processor)
            self.module.processor = self.copy

    def put_back(self) -> None:
        """Scopes of several threads end in any order: the last one finds what was there before the first.

        A processor that the user has set meanwhile stays.
        """
        with _lock:
            _replaced[self.copy].over = True
            while (replaced := _replaced.get(self.module.processor)) is not None and replaced.over:
                self.module.processor = replaced.processor


def standins(models: tuple[torch.nn.Module, ...], backend: Any) -> tuple[list[Standin], Routed]:
    """Copies of the models' processors that run through polyattn, and which those are."""
    made: list[Standin] = []
    found: dict[str, list[str]] = {"dispatched": [], "patched": [], "left": []}
    for model in models:
        for name, module in model.named_modules():
            processor = getattr(module, "processor", None)
            if processor is None:
                continue
            how = _how(processor)
            found[how].append(f"{name or type(module).__name__}: {type(processor).__name__}")
            if how == "dispatched":
                made.append(Standin(module, _dispatching(processor, backend)))
            elif how == "patched":
                made.append(Standin(module, _patching(processor)))
    return made, Routed(**{how: tuple(names) for how, names in found.items()})


def _how(processor: Any) -> str:
    if hasattr(processor, "_attention_backend"):
        return "dispatched"
    return "patched" if _calls_sdpa(type(processor)) else "left"


def _calls_sdpa(cls: type) -> bool:
    """Whether a processor's own code names torch's function."""
    methods = (inspect.unwrap(each) for base in cls.__mro__ for each in vars(base).values() if callable(each))
    return any(_SDPA in method.__code__.co_names for method in methods if hasattr(method, "__code__"))


def _dispatching(processor: Any, backend: Any) -> Any:
    twin = copy.copy(processor)  # of a module, too, which shares its parameters then
    twin.__class__ = _standing_in(type(twin), patched=False)
    twin._attention_backend = backend
    return twin


def _patching(processor: Any) -> Any:
    twin = copy.copy(processor)
    twin.__class__ = _standing_in(type(twin), patched=True)
    return twin


def _standing_in(cls: type, *, patched: bool) -> type:
    """A subclass that copies as what it replaced, and if `patched` runs within `patch_sdpa`.

    Still an instance of `cls`, with its name and its call's signature.
    """
    known = _classes.get((cls, patched))
    if known is not None:
        return known

    reduced: Callable[..., Any] = cls.__reduce_ex__

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        replaced = _replaced.get(self)
        # from protocol 2 on, pickle insists on the class of what it was given
        return reduced(self, protocol) if replaced is None else replaced.processor.__reduce_ex__(1)

    own = {"__reduce_ex__": __reduce_ex__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if patched:
        entry = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
        own[entry] = _within_patch_sdpa(getattr(cls, entry))
    return _classes.setdefault((cls, patched), type(cls.__name__, (cls,), own))


def _within_patch_sdpa(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def within(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patch_sdpa():
            return call(self, *args, **kwargs)

    return within
