"""Runs one scene in this process, which passes for a ROCm machine: argv is its function and the emulators it needs."""

from __future__ import annotations

import importlib
import sys

import torch

from tests.emulators.rocm import scenes, stack
from tests.emulators.rocm.worker import as_rocm_build


def main() -> None:
    """scene FUNCTION rocm.triton_amd"""
    function, *emulators = sys.argv[1:]
    torch.set_num_threads(1)
    with stack.using(lint=False) as passed_for:
        as_rocm_build(passed_for)
        for name in emulators:
            importlib.import_module(f"tests.emulators.{name}").install()
        getattr(scenes, function)()


if __name__ == "__main__":
    main()
