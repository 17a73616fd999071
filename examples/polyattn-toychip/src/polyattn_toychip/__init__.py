"""polyattn on toychip: a complete third party's platform package, to copy from."""

from polyattn.vendor import Platform
from polyattn_toychip import detection

__all__ = ["platform"]


def platform() -> Platform:
    """The entry point `toychip` of the group `polyattn.platforms`; imports the standard library and the door alone."""
    return Platform(
        name="toychip",
        device_type=detection.DEVICE_TYPE,
        priority=5,  # above the CPU's 0: where a device is found, it is pa.current_platform
        probe=detection.probe,
        machine=detection.machine,
        backends="polyattn_toychip.backends:BACKENDS",
        order=lambda request, machine: ("rows", "blocked"),
        variables=detection.VARIABLES,
    )
