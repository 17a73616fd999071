"""A vendor's device family: how it is found, what is known of one device, which backends it brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyattn.door.backend import Backend
    from polyattn.door.request import Request

#: The level of the vendor's door that this core speaks. A platform of another level is declined with that reason.
API_LEVEL = 1


@dataclass(frozen=True)
class Found:
    """A probe's yes: usable devices are present. `detail` says what was seen."""

    detail: str = ""
    devices: int = 1


@dataclass(frozen=True)
class Declined:
    """A probe's no, and why."""

    reason: str


@dataclass(frozen=True)
class Machine:
    """Facts of one device and its software; JSON both ways, so that a described machine can be asked too.

    arch          the vendor's own architecture name ("sm_90", "gfx942", "x86_64")
    versions      installed distributions and runtimes by name; backends' `requires` are judged by it
    build_facts   what installed kernels were built with
    env           vendor variables that change what runs, as read once
    """

    platform: str
    device_type: str
    index: int = 0
    arch: str = ""
    name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    build_facts: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready form; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Machine:
        """The machine that `as_dict` described; unknown or missing names raise ValueError."""
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(facts) - known)
        missing = sorted({"platform", "device_type"} - set(facts))
        if unknown or missing:
            raise ValueError(
                f"machine description: unknown fields {unknown}, missing fields {missing}; fields are {sorted(known)}"
            )
        return cls(**facts)


def _keep_order(request: Request, machine: Machine) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Platform:
    """What a vendor package's entry point returns.

    name                 unique: "cuda", "rocm", "npu", ...
    device_type          torch's device type whose tensors it serves
    priority             among platforms that are found, the highest becomes current_platform; the CPU has 0
    probe                () -> Found | Declined; creates no device context, survives fork
    machine              (device: "type:index") -> Machine
    backends             the backends, or "module:ATTRIBUTE" of them, imported when the platform is first used
    order                (request, machine) -> backend names, fastest first; names left out follow in `backends`' order
    collective_backend   torch.distributed's backend for its devices
    api                  the door's level it was written for
    capturing            () -> bool: is the current stream being captured into a graph? None: the platform has no graphs
    variables            names of the vendor's environment variables that change what runs
    cache_write          "module:function" that writes rows into a page pool, called as
                         f(k_pool, v_pool, k [T,Hk,D], v [T,Hk,Dv], slots [T]) -> None; slots outside the pool are
                         skipped. None: torch's index_copy
    """

    name: str
    device_type: str
    priority: int
    probe: Callable[[], Found | Declined]
    machine: Callable[[str], Machine]
    backends: str | tuple[Backend, ...]
    order: Callable[[Request, Machine], Sequence[str]] = _keep_order
    collective_backend: str = "gloo"
    api: int = API_LEVEL
    capturing: Callable[[], bool] | None = None
    variables: tuple[str, ...] = ()
    cache_write: str | None = None
