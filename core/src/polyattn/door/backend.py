"""What one attention implementation is: its slots, what each really does, what must be installed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from polyattn.door.platform import Machine
from polyattn.door.request import KINDS, Request


@dataclass(frozen=True)
class Features:
    """What one slot really does. Everything defaults to "no"; None on a limit means "any".

    kinds           structure kinds taken, from `polyattn.vendor.KINDS`. "packed" with `max_documents=1` is [real, pad]
                    only. A packed or paged request that carries spans needs "spans" as well
    causal, window  bottom-right aligned, at any Sq and Sk
    lse             float32, natural log, -inf on rows without a visible key
    gqa             fewer KV heads than query heads
    v_dim           a value head_dim that differs from the query's
    backward        gradients of q, k and v; `mask_grad`: of an additive mask too
    deterministic   the same bits run to run, forward and backward
    out             writes into the caller's buffer and returns it
    capture         may be captured into a device graph
    compile         may run inside a compiled graph (through the core's operator)
    dtypes          dtype names; empty means none
    head_dims       accepted head dims (a range or a set), page_sizes likewise
    quant           quantisation formats: "fp8", "int8", "mxfp8", "mxfp4"
    exact           False: it always quantises, so that only a request that asks for one of `quant` may have it
    """

    kinds: frozenset[str] = frozenset({"dense"})
    causal: bool = False
    window: bool = False
    softcap: bool = False
    lse: bool = False
    gqa: bool = False
    v_dim: bool = False
    backward: bool = False
    mask_grad: bool = False
    deterministic: bool = False
    out: bool = False
    capture: bool = False
    compile: bool = True
    dtypes: frozenset[str] = frozenset()
    head_dims: Collection[int] | None = None
    page_sizes: Collection[int] | None = None
    max_documents: int | None = None
    quant: frozenset[str] = frozenset()
    exact: bool = True

    def __post_init__(self) -> None:
        unknown = self.kinds - frozenset(KINDS)
        if unknown:
            raise ValueError(f"Features.kinds: unknown {sorted(unknown)}; known kinds are {', '.join(KINDS)}")


@dataclass(frozen=True)
class Slot:
    """One forward of a backend.

    `call` is "module:function", imported on first use. The function is called as

        f(q, k, v, out, *, meta, causal, scale, window, softcap, need_lse, options) -> (out, lse | None)

    and answers in polyattn's conventions (module docstring of `polyattn.vendor`).

    `bind`, where stated, is "module:function" too: called once a shape as bind(request, options), it returns
    f(q, k, v, out, *, meta), which has done what `call` would do at each call; or None, where it gains nothing.
    """

    call: str
    features: Features = Features()
    bind: str = ""

    @property
    def name(self) -> str:
        """The function's name, for reports."""
        return self.call.rpartition(":")[2]


@dataclass(frozen=True)
class Requires:
    """A distribution a backend needs: its name, the least version ("" for any), and how to get it."""

    package: str
    version: str = ""
    hint: str = ""


def _no_objection(request: Request, machine: Machine) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Backend:
    """One attention implementation on one platform.

    name         unique on its platform: lower case letters, digits, "_"
    slots        its forwards, fastest first; the first whose features cover a request runs
    requires     distributions that must be installed
    check        reasons against a request that features cannot express (pure: facts in, texts out)
    options      names of the option fields it honours; a stated field that is not among them is a reason against it
    tolerances   absolute error against the float64 reference on unit-normal inputs, by dtype name;
                 the conformance kit caps it
    """

    name: str
    slots: tuple[Slot, ...]
    requires: tuple[Requires, ...] = ()
    check: Callable[[Request, Machine], tuple[str, ...]] = _no_objection
    options: frozenset[str] = frozenset()
    tolerances: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.replace("_", "a").isalnum() or self.name != self.name.lower() or self.name == "auto":
            raise ValueError(f"Backend.name: {self.name!r} must be lower case letters, digits and '_', and not 'auto'")
        if not self.slots:
            raise ValueError(f"Backend.slots: {self.name} has none; a backend without a forward cannot run")


@dataclass(frozen=True)
class Options:
    """Base of a platform's typed options: subclass as a frozen dataclass and name the platform.

    >>> @dataclass(frozen=True)
    ... class ToyOptions(Options):
    ...     platform: ClassVar[str] = "toy"
    ...     splits: int = 0
    >>> ToyOptions(splits=2).stated()
    ('splits',)
    """

    platform: ClassVar[str] = ""

    def stated(self) -> tuple[str, ...]:
        """Names of the fields that differ from their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != _default(f))


def _default(option: Any) -> Any:
    return option.default_factory() if callable(option.default_factory) else option.default
