"""Runs one scene in this process, which gets the emulated device: argv is its module, its function and the stack."""

from __future__ import annotations

import importlib
import json
import sys

import torch

from tests.emulators.npu import torch_npu_module
from tests.emulators.npu.stack import using


def main() -> None:
    """scene MODULE FUNCTION '{"soc": "A5"}'"""
    module, function, stack = sys.argv[1:]
    torch.set_num_threads(1)
    with using(**json.loads(stack)):
        torch_npu_module.install()
        getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
