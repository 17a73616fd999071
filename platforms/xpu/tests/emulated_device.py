"""A pytest plugin, `-p platforms.xpu.tests.emulated_device`: this process has the emulated packages from the start."""

from __future__ import annotations

from tests.emulators.xpu.emulated import emulators_of
from tests.emulators.xpu.stack import using

#: What the vendor leaves undefined, or drops without a word, is an error on this machine.
_MACHINE = using(lint=True, torch="2.8.0+xpu")  # the one torch that IPEX loads beside
_MACHINE.__enter__()  # for the whole process
for _backend in ("vllm_xpu", "ipex", "sdpa"):
    for _emulator in emulators_of(_backend):
        _emulator.install()
