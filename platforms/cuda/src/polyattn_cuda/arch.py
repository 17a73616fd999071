"""Architectures of these devices, as the facts of a machine name them ("sm_90")."""

from __future__ import annotations

from polyattn.vendor import Machine

#: The first that FlashAttention 2 has code for, torch's own included.
FLASH2 = 80


def arch_below(machine: Machine, least: int) -> tuple[str, ...]:
    """Against a device older than sm_<least>; an unknown one is given the benefit of the doubt."""
    digits = machine.arch.removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) >= least:
        return ()
    return (f"architecture {machine.arch} is older than sm_{least}",)
