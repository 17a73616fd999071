"""A pytest plugin, `-p platforms.musa.tests.emulated_device`: this process has the emulated packages from the start."""

from __future__ import annotations

from tests.emulators.musa.emulated import emulators_of
from tests.emulators.musa.stack import using

#: What the vendor leaves undefined, or drops without a word, is an error on this machine.
_MACHINE = using(lint=True)
_MACHINE.__enter__()  # for the whole process
for _backend in ("mate", "mudnn", "sdpa"):
    for _emulator in emulators_of(_backend):
        _emulator.install()
