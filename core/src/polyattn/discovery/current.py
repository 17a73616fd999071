"""`current_platform`: a stand-in that asks detection at every read, so that importing it by value is never stale."""

from __future__ import annotations

from collections.abc import Callable

from polyattn.discovery.backends import backends_of
from polyattn.discovery.state import current
from polyattn.environment import PolyattnWarning
from polyattn.vendor import Backend, Capability, Machine, Platform


class CurrentPlatform:
    """The platform of highest priority found in this process, for code that has no tensor yet.

    With a tensor in hand, its device decides instead. Besides the attributes below, `is_<name>()` tells whether the
    platform has that name, for any name: `is_cuda()`, `is_cpu()`, a plugin's own.

    >>> from polyattn import current_platform
    >>> current_platform.is_some_other_vendor()
    False
    """

    @property
    def platform(self) -> Platform:
        """The vendor's record."""
        return current()

    @property
    def name(self) -> str:
        return current().name

    @property
    def device_type(self) -> str:
        """torch's device type: "cpu", "cuda", "npu", ..."""
        return current().device_type

    @property
    def priority(self) -> int:
        return current().priority

    @property
    def collective_backend(self) -> str:
        """The torch.distributed backend for its devices."""
        return current().collective_backend

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All its backends, whether or not the packages they need are installed."""
        return backends_of(current())

    def machine(self, index: int = 0) -> Machine:
        """Facts of one of its devices. Unlike detection, a vendor may create a device context for them."""
        from polyattn.machine import machine_of  # it looks through this package for what backends require

        platform = current()
        return machine_of(platform, f"{platform.device_type}:{index}")

    def supports(self, capability: Capability) -> bool:
        """Whether one slot has all of `capability` and would run on its first device, as `polyattn info` has it.

        Whose packages are missing, or refuse this machine, promises nothing. Asked once; it may import such packages.
        """
        from polyattn.usable import supports  # it asks the resolver, which few processes need without a tensor

        return supports(capability, self.backends, self.machine())

    def __getattr__(self, attribute: str) -> Callable[[], bool]:
        if attribute.startswith("is_") and len(attribute) > 3:
            return lambda: current().name == attribute[3:]
        raise AttributeError(
            f"current_platform has no attribute {attribute!r}; it has name, device_type, priority, backends, "
            "collective_backend, platform, machine(), supports() and is_<platform name>()"
        )

    def __repr__(self) -> str:
        try:
            platform = current()
        except (ImportError, ValueError, RuntimeError, PolyattnWarning) as error:
            return f"<current_platform: none, {error}>"
        return f"<current_platform: {platform.name}, device type {platform.device_type}, priority {platform.priority}>"

    def __reduce__(self) -> str:
        # Copies and pickles are the one object itself.
        return "current_platform"


current_platform = CurrentPlatform()
