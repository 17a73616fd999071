"""A pytest plugin, `-p platforms.npu.tests.emulated_device`: this process has the emulated device from the start on."""

from __future__ import annotations

import os
import sys
import types

from tests.emulators.npu import torch_npu_module
from tests.emulators.npu.stack import using

#: The machine, of which the environment may state another CANN; undefined answers of the vendor are errors on it.
CANN = os.environ.get("EMULATED_CANN", "8.5")
_MACHINE = using(cann=CANN, lint=True)


def _tell_cann() -> None:
    """torch-npu's own way to ask for CANN's version, where the emulator has none."""
    if "torch_npu.npu.utils" not in sys.modules:
        utils = types.ModuleType("torch_npu.npu.utils")
        utils.get_cann_version = lambda module="CANN": CANN.partition("-")[0]  # type: ignore[attr-defined]
        sys.modules["torch_npu.npu.utils"] = utils


_MACHINE.__enter__()  # for the whole process
torch_npu_module.install()
_tell_cann()
