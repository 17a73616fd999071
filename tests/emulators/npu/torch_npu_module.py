"""The modules `torch_npu` and `torch.npu` of the machine passed for, with the native ops behind them."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.emulators.npu import device, fia, fusion, laser, prompt, registry, schemas
from tests.emulators.npu.stack import SOCS, current

ANSWERS = {
    "npu_fusion_attention": fusion.npu_fusion_attention,
    "npu_fusion_attention_grad": fusion.npu_fusion_attention_grad,
    "npu_fused_infer_attention_score": fia.npu_fused_infer_attention_score,
    "npu_fused_infer_attention_score_v2": fia.npu_fused_infer_attention_score_v2,
    "npu_prompt_flash_attention": prompt.npu_prompt_flash_attention,
}
#: MindIE-SD's own ops that are answered.
MINDIESD = {"la": laser.la}
#: A schema among the strings of an extension's file.
_SCHEMA = re.compile(r"(\w+)(\((?:Tensor|int) .*\)\s*->\s*.+)", re.DOTALL)


def install() -> None:
    """Makes this process one with torch_npu on the current stack's machine. Once, and for good."""
    npu = _device_module()
    device.install(npu)
    module = types.ModuleType("torch_npu", "The emulated torch_npu.")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.__version__ = current().torch_npu  # type: ignore[attr-defined]
    module.npu = npu  # type: ignore[attr-defined]
    sys.modules |= {"torch_npu": module, "torch_npu.npu": npu, "torch.npu": npu}
    for name, schema in schemas.npu(current()).items():
        registry.define("npu", name, schema, ANSWERS.get(name))
        setattr(module, name, getattr(torch.ops.npu, name))
    torch.library.register_autograd(
        "npu::npu_fusion_attention", _backward, setup_context=_keep, lib=registry._libraries["npu"]
    )
    load = torch.ops.load_library
    torch.ops.load_library = lambda path: _load(str(path)) if "libPTAExtensionOPS" in str(path) else load(path)


def _load(path: str) -> None:
    """Defines what the extension's own file declares; the code in it does not run."""
    if current().device_count == 0:
        raise OSError("libascendcl.so: cannot open shared object file: No such file or directory")
    for text in Path(path).read_bytes().split(b"\0"):
        if b"->" in text and text.isascii() and (found := _SCHEMA.fullmatch(text.decode())):
            registry.define("mindiesd", found[1], found[2], MINDIESD.get(found[1]))


def _device_module() -> types.ModuleType:
    npu = types.ModuleType("torch_npu.npu", "The emulated torch.npu.")
    facts: dict[str, Any] = {
        "is_available": lambda: current().device_count > 0,
        "device_count": lambda: current().device_count,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "get_device_name": lambda index=0: _of_card(index, SOCS[current().soc][1]),
        "get_device_properties": lambda index=0: _of_card(
            index, types.SimpleNamespace(name=SOCS[current().soc][1], total_memory=64 << 30)
        ),
        "mem_get_info": lambda index=0: (60 << 30, 64 << 30),
        "memory_allocated": lambda index=0: 0,
        "max_memory_allocated": lambda index=0: 0,
        "empty_cache": lambda: None,
        "get_soc_version": lambda: current().soc_version,
        "synchronize": lambda index=0: None,
        "is_current_stream_capturing": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
        "config": types.SimpleNamespace(allow_internal_format=False),
    }
    for name, value in facts.items():
        setattr(npu, name, value)
    return npu


def _of_card(index: int, fact: Any) -> Any:
    if not 0 <= index < current().device_count:
        raise AssertionError("Invalid device id")
    return fact


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    names = [a.name for a in torch.ops.npu.npu_fusion_attention.default._schema.arguments]
    asked = dict(zip(names, inputs, strict=False))
    ctx.tensors = [asked.pop(name) for name in ("query", "key", "value")]
    ctx.kept = {"softmax_max": output[1], "softmax_sum": output[2], "attention_in": output[0]}
    ctx.asked = {n: v for n, v in asked.items() if n not in ("dropout_mask", "seed", "offset", "scale")}
    ctx.scale, ctx.count = asked["scale"], len(inputs)


def _backward(ctx: Any, dy: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    head_num, layout = (ctx.asked.pop(name) for name in ("head_num", "input_layout"))
    grads = torch.ops.npu.npu_fusion_attention_grad(
        *ctx.tensors, dy, head_num, layout, scale_value=ctx.scale, **ctx.kept, **ctx.asked
    )
    return (*grads[:3], *[None] * (ctx.count - 3))
