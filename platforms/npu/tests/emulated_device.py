"""A pytest plugin, `-p platforms.npu.tests.emulated_device`: this process has the emulated device from the start on."""

from __future__ import annotations

import os

from tests.emulators.npu import torch_npu_module
from tests.emulators.npu.stack import using

#: The machine, of which the environment may state another CANN; undefined answers of the vendor are errors on it.
_MACHINE = using(cann=os.environ.get("EMULATED_CANN", "8.5"), lint=True)


_MACHINE.__enter__()  # for the whole process
torch_npu_module.install()
