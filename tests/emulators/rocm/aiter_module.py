"""The module `aiter` of the distribution amd-aiter, with the functions of the build that is passed for."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch

from tests.emulators.rocm import aiter_main, aiter_prefill, aiter_wheel, stack

VERSIONS = {"amd-aiter": stack.Stack().aiter}
ENV: dict[str, str] = {}


def functions() -> types.ModuleType:
    """The emulated module of the build's functions."""
    return aiter_wheel if stack.now().build.window_items == (2,) else aiter_main


def install() -> None:
    """Put `aiter` in place, with the names that callers import it under. The real one compiles at its import."""
    source = functions()
    dtypes = types.SimpleNamespace(
        fp8=aiter_prefill.float8_type(), bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32, i32=torch.int32
    )
    for name in ("aiter", "aiter.ops", "aiter.ops.mha"):
        module = types.ModuleType(name, "Emulated.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name != "aiter.ops.mha")
        module.__path__ = []
        sys.modules[name] = module
    top, ops, mha = (sys.modules[name] for name in ("aiter", "aiter.ops", "aiter.ops.mha"))
    top.ops, ops.mha, top.dtypes = ops, mha, dtypes
    for name in source.NAMES:
        setattr(mha, name, getattr(source, name))
        setattr(top, name, getattr(source, name))
