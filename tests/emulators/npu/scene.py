"""Runs one group of scenes.py in this process, which gets the emulated device; argv[1] names the group."""

from __future__ import annotations

import sys

import torch

from tests.emulators.npu import scenes, torch_npu_module


def main() -> None:
    """argv[1] names the group."""
    torch.set_num_threads(1)
    torch_npu_module.install()
    getattr(scenes, sys.argv[1])()


if __name__ == "__main__":
    main()
