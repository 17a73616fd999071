"""`BreakableGraph`: a module's forward replayed as device graphs, split at the attention calls that must stay eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    The first call with a signature (shapes, strides, dtypes, structures' kinds and facts, plain values) runs the module
    twice, once to warm up and once to capture; later calls copy their tensors in and replay. The whole forward is one
    graph where every attention call may be captured. A call stays between two graphs, and runs eagerly in each replay,

    - whose route has no slot that may be captured,
    - whose structure is an argument of the module, so that each replay brings its own; but a `Packed` with
      `capacity=` is part of the graph, and the lengths of the one that is brought are written into it,
    - that runs over several ranks, or is quantised with steps to skip,
    - or for which `eager` says so: it gets what the call states (`structure`, `causal`, `backend`, ...).

    Structures that the module or a closure keeps are constant. What a graph cannot do again must not happen inside, as
    with any graph: values read on the host, and structures made there, which are refused.

    Args:
        module: what is called; it must launch work on one device only.
        eager: further calls that stay out of the graphs.
        entries: signatures that are kept; calls with any other run eagerly, with one warning.

    Raises:
        UnsupportedRequest: the device has no graphs, or the module makes a structure inside.
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
        signature = _signature(leaves, spec, tensors[0].device)
        entry = self._entries.get(signature)
        if entry is None:
            if len(self._entries) >= self._limit:
                return self._eagerly(
                    f"{self._limit} signatures are captured, and this call has another one", args, kwargs
                )
            entry = self._entries[signature] = self._captured(leaves, spec, tensors, structures)
        else:
            for held, given in zip(entry.tensors, tensors, strict=True):
                held.copy_(given)
            _refresh(entry.structures, structures)
            entry.segments.replay(structures)
        return tree_unflatten([_own(leaf) for leaf in entry.out], entry.spec)

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
        args, kwargs = tree_unflatten([held.get(id(leaf), leaf) for leaf in leaves], spec)
        for structure in structures:
            structure.to(device.device)
        with device.stream():
            watching = Watching()
            with recording(watching):
                self._module(*args, **kwargs)
            device.settle()
            capturing = Capturing(device, watching.seen, structures, self._stays)
            with recording(capturing):
                capturing.begin()
                try:
                    answer = self._module(*args, **kwargs)
                except BaseException:
                    capturing.give_up()
                    raise
                capturing.end()
            device.settle()
        out, out_spec = tree_flatten(answer)
        return _Entry(capturing.made, [held[id(tensor)] for tensor in tensors], structures, out, out_spec)

    def _stays(self, stated: Mapping[str, Any]) -> bool:
        parallel, quant = stated.get("parallel"), stated.get("quant")
        spread = parallel is not None and parallel.world_size > 1
        return spread or bool(getattr(quant, "skip_steps", ())) or self._eager(stated)


def _signature(leaves: list[Any], spec: TreeSpec, device: torch.device) -> Any:
    """All that must be as it was for a replay to be right."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return spec, tuple(map(_fact, leaves)), choices_here.get(), autocast


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, Structure):
        return type(leaf), leaf.route_key
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
        if mine is theirs or not isinstance(mine, Packed) or mine.capacity is None:
            continue
        assert isinstance(theirs, Packed)
        mine.update_(theirs.lengths_q, None if mine.facts.same_lengths else theirs.lengths_k)


def _own(leaf: Any) -> Any:
    """A copy, since the next replay writes over what the graph holds."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
