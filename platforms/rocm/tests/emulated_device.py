"""A pytest plugin, `-p platforms.rocm.tests.emulated_device`: this process has the emulated packages from the start."""

from __future__ import annotations

from platforms.rocm.tests.emulated_packages import PACKAGES
from tests.emulators.kit_worker import rows_by_torch
from tests.emulators.rocm import stack
from tests.emulators.rocm.emulated import emulators_of
from tests.emulators.rocm.worker import as_rocm_build

#: What the vendor leaves undefined, or drops without a word, is an error on this machine.
_MACHINE = stack.using(lint=True)
as_rocm_build(_MACHINE.__enter__())  # for the whole process
rows_by_torch()
for _backend in (*PACKAGES, "flex", "sdpa"):
    for _emulator in emulators_of(_backend):
        _emulator.install()
