"""`BreakableGraph`: a module's forward replayed as device graphs, split at the attention calls that must stay eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from polyattn.environment import warn
from polyattn.errors import UnsupportedRequest
from polyattn.graphs.device import GraphDevice
from polyattn.graphs.segments import Capturing, Segments, Watching
from polyattn.recorders import here, recording
from polyattn.scope import choices_here
from polyattn.structures import Packed, Structure

#: What a module may answer beside tensors, and holds none.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class _Entry:
    """One signature's graphs and the tensors that they read and write."""

    segments: Segments
    tensors: list[torch.Tensor]
    structures: list[Structure]
    out: list[Any]
    spec: TreeSpec


class BreakableGraph:
    """`module(*args, **kwargs)` from device graphs; answers are the caller's own copies. Inference only.

    The first call with a signature (shapes, strides, dtypes, kinds of structures, plain values) runs the module twice,
    once to warm up and once to capture; later calls copy their tensors in and replay. The whole forward is one
    graph where every attention call may be captured. A call stays between two graphs, and runs eagerly in each replay,

    - whose route has no slot that may be captured,
    - whose structure is an argument of the module, so that each replay brings its own; but a `Packed` with
      `capacity=` is part of the graph, and the lengths of the one that is brought are written into it,
    - that runs over several ranks, or is quantised with steps to skip,
    - or for which `eager` says so: it gets what the call states (`structure`, `causal`, `backend`, ...).

    Structures that the module or a closure keeps are constant. What a graph cannot do again must not happen inside, as
    with any graph: values read on the host, and structures made there, which are refused. Weights may change in place,
    not move. Calls of several threads take turns; all are made on one stream.

    Args:
        module: what is called; it must launch work on one device only. It answers tensors, plain values, and
            containers that `torch.utils._pytree` knows of them. A call inside compiled code is never between graphs.
        eager: further calls that stay out of the graphs.
        entries: signatures that are kept; calls with any other run eagerly, with one warning.

    Raises:
        UnsupportedRequest: the device has no graphs, arguments lie on several devices, the module makes a structure
            inside, or compiled code in it takes one that each replay would bring.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        eager: Callable[[Mapping[str, Any]], bool] = lambda stated: False,
        entries: int = 8,
    ) -> None:
        if isinstance(entries, bool) or not isinstance(entries, int) or entries < 1:
            raise ValueError(f"entries: a positive integer is needed, got {entries!r}")
        self._module, self._eager, self._limit = module, eager, entries
        self._entries: dict[Any, _Entry] = {}
        self._told: set[str] = set()
        self._turn = RLock()

    @property
    def breaks(self) -> list[int]:
        """How many attention calls stay between graphs, for each signature."""
        return [len(entry.segments.breaks) for entry in self._entries.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's answer."""
        if here() is not None or torch.compiler.is_compiling():
            return self._module(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        structures = [leaf for leaf in leaves if isinstance(leaf, Structure)]
        if not tensors:
            raise ValueError("graph: at least one tensor among the arguments says which device is meant")
        if torch.is_grad_enabled():
            return self._eagerly("gradients are enabled, and graphs here have none", args, kwargs)
        _check_one_device(tensors)
        with self._turn:
            signature = _signature(self._module, leaves, spec, tensors[0].device)
            entry = self._entries.get(signature)
            full = entry is None and len(self._entries) >= self._limit
            if entry is not None:
                for held, given in zip(entry.tensors, tensors, strict=True):
                    held.copy_(given)
                _refresh(entry.structures, structures)
                entry.segments.replay(structures)
            elif not full:
                entry = self._entries[signature] = self._captured(leaves, spec, tensors, structures)
            if entry is not None:
                return tree_unflatten([_own(leaf) for leaf in entry.out], entry.spec)
        return self._eagerly(f"{self._limit} signatures are captured, and this call has another one", args, kwargs)

    def _eagerly(self, why: str, args: Any, kwargs: Any) -> Any:
        if why not in self._told:
            warn(f"BreakableGraph: {why}; the module runs eagerly")
            self._told.add(why)
        return self._module(*args, **kwargs)

    def _captured(
        self, leaves: list[Any], spec: TreeSpec, tensors: list[torch.Tensor], structures: list[Structure]
    ) -> _Entry:
        device = GraphDevice(tensors[0].device)
        held = {id(tensor): tensor.clone(memory_format=torch.preserve_format) for tensor in tensors}
        # lengths that later calls bring are written into structures of our own, not into the caller's
        own = {id(structure): copy.copy(structure) for structure in structures}
        inside = {**held, **own}
        args, kwargs = tree_unflatten([inside.get(id(leaf), leaf) for leaf in leaves], spec)
        structures = [own[id(structure)] for structure in structures]
        for structure in structures:
            structure.to(device.device)
        with device.stream(), _without_cached_casts(device.device.type):
            watching = Watching()
            with recording(watching):
                self._module(*args, **kwargs)
            for tensor in tensors:  # the module may write into its arguments
                held[id(tensor)].copy_(tensor)
            device.settle()
            capturing = Capturing(device, watching.seen, structures, self._stays)
            with recording(capturing):
                capturing.begin()
                try:
                    answer = self._module(*args, **kwargs)
                except BaseException:
                    capturing.give_up()
                    raise
                capturing.finish()
            device.settle()
        out, out_spec = tree_flatten(answer)
        _check_answer(out)
        return _Entry(capturing.made, [held[id(tensor)] for tensor in tensors], structures, out, out_spec)

    def _stays(self, stated: Mapping[str, Any]) -> bool:
        parallel, quant = stated.get("parallel"), stated.get("quant")
        spread = parallel is not None and parallel.world_size > 1
        return spread or bool(getattr(quant, "skip_steps", ())) or self._eager(stated)


def _signature(module: Any, leaves: list[Any], spec: TreeSpec, device: torch.device) -> Any:
    """All that must be as it was for a replay to be right."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    first: dict[int, int] = {}  # one tensor in two places stays one, and two stay two
    same = tuple(first.setdefault(id(leaf), place) for place, leaf in enumerate(leaves))
    modes = autocast, torch.is_inference_mode_enabled(), getattr(module, "training", None)
    return _hashable(spec), tuple(map(_fact, leaves)), same, choices_here.get(), modes


def _hashable(spec: TreeSpec) -> TreeSpec | str:
    """An older torch keeps a dictionary's names in a list."""
    try:
        hash(spec)
    except TypeError:
        return repr(spec)
    return spec


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, Structure):  # what each replay brings is routed by each replay
        return type(leaf), leaf.route_key if leaf.facts.capacity else getattr(leaf, "queries", None)
    try:
        hash(leaf)
    except TypeError:
        raise UnsupportedRequest(
            f"graph: an argument of type {type(leaf).__name__} can change unseen; pass tensors, structures and values"
        ) from None
    return type(leaf), leaf


def _refresh(held: list[Structure], given: list[Structure]) -> None:
    """The lengths that were brought, in the structures that graphs read."""
    for mine, theirs in zip(held, given, strict=True):
        if not isinstance(mine, Packed) or mine.capacity is None:
            continue
        assert isinstance(theirs, Packed)
        if (mine.lengths_q, mine.lengths_k) != (theirs.lengths_q, theirs.lengths_k):
            mine.update_(theirs.lengths_q, None if mine.facts.same_lengths else theirs.lengths_k)


def _check_one_device(tensors: list[torch.Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UnsupportedRequest(
            f"graph: arguments lie on {', '.join(sorted(map(str, devices)))}; a graph would keep the first "
            "call's values of those on another device than its own: move all to one"
        )


def _check_answer(leaves: list[Any]) -> None:
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, (torch.Tensor, *_PLAIN))):
            raise UnsupportedRequest(
                f"graph: the module answers a {type(leaf).__name__}, whose tensors the next replay would write over: "
                "answer tensors, tuples, lists, dictionaries, or register it with torch.utils._pytree"
            )


@contextmanager
def _without_cached_casts(kind: str) -> Iterator[None]:
    """Autocast's copies of weights die with the caller's scope: a graph makes its own."""
    cached = torch.is_autocast_cache_enabled()
    if not torch.is_autocast_enabled(kind):
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _own(leaf: Any) -> Any:
    """A copy, since the next replay writes over what the graph holds."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
