"""The modules `torch_npu` and `torch.npu` of the machine passed for, with the native ops behind them."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.emulators.npu import (
    device,
    dtypes,
    fakes,
    fia,
    fia_out,
    fusion,
    fusion_gradients,
    fusion_versions,
    incre,
    laser,
    prompt,
    quant_attention,
    quant_ops,
    quantise,
    registry,
    schemas,
    sdpa,
)
from tests.emulators.npu.stack import SOCS, current


class Op(NamedTuple):
    """What stands for one op: its answer, its results without data, the tensors it takes on the CPU."""

    answer: Callable[..., Any]
    fake: Callable[..., Any]
    host: tuple[str, ...] = ()


#: With ops that no backend of ours calls (fusion v2 and v3, incre, get_max_workspace): a torch_npu has them, and
#: torch's own SDPA and diffusers call some.
_LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
OPS = {
    "npu_fusion_attention": Op(fusion.npu_fusion_attention, fakes.npu_fusion_attention),
    "npu_fusion_attention_grad": Op(fusion.npu_fusion_attention_grad, fakes.gradients),
    "npu_fusion_attention_v2": Op(fusion_versions.npu_fusion_attention_v2, fakes.npu_fusion_attention_v2),
    "npu_fusion_attention_grad_v2": Op(fusion_versions.npu_fusion_attention_grad_v2, fakes.gradients_v2),
    "npu_fusion_attention_v3": Op(fusion_versions.npu_fusion_attention_v3, fakes.npu_fusion_attention_v3, _LENGTHS),
    "npu_fusion_attention_grad_v3": Op(fusion_versions.npu_fusion_attention_grad_v3, fakes.gradients, _LENGTHS),
    "npu_fused_infer_attention_score": Op(fia.npu_fused_infer_attention_score, fakes.npu_fused_infer_attention_score),
    "npu_fused_infer_attention_score.out": Op(fia_out.npu_fused_infer_attention_score_out, fakes.out_overload),
    "_npu_fused_infer_attention_score_get_max_workspace": Op(fia_out.workspace, fia_out.workspace),
    "npu_fused_infer_attention_score_v2": Op(
        fia.npu_fused_infer_attention_score_v2, fakes.npu_fused_infer_attention_score_v2
    ),
    "npu_fused_infer_attention_score_v2.out": Op(fia_out.npu_fused_infer_attention_score_v2_out, fakes.out_overload),
    "_npu_fused_infer_attention_score_v2_get_max_workspace": Op(fia_out.workspace, fia_out.workspace),
    "npu_prompt_flash_attention": Op(prompt.npu_prompt_flash_attention, fakes.like_query),
    "npu_incre_flash_attention": Op(incre.npu_incre_flash_attention, fakes.like_query),
    "npu_dynamic_block_quant": Op(quantise.npu_dynamic_block_quant, fakes.npu_dynamic_block_quant),
    "npu_dynamic_mx_quant": Op(quantise.npu_dynamic_mx_quant, fakes.npu_dynamic_mx_quant),
}
#: MindIE-SD's own ops that are answered.
MINDIESD = {
    "la": laser.la,
    "fused_infer_attention_score_v2": quant_ops.fused_infer_attention_score_v2,
    "quant_flash_attn": quant_ops.quant_flash_attn,
    "quant_flash_attn_metadata": quant_ops.quant_flash_attn_metadata,
}
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
    utils = types.ModuleType("torch_npu.npu.utils", "The emulated torch_npu.npu.utils.")
    utils.get_cann_version = lambda module="CANN": current().kernels.version  # type: ignore[attr-defined]
    sys.modules |= {"torch_npu": module, "torch_npu.npu": npu, "torch.npu": npu, "torch_npu.npu.utils": utils}
    for name, number in dtypes.NAMED.items():
        setattr(module, name, number)
    module.float8_e4m3fn, module.float8_e5m2 = torch.float8_e4m3fn, torch.float8_e5m2  # type: ignore[attr-defined]
    for name, schema in schemas.npu(current()).items():
        answer, fake, host = OPS[name]
        registry.define("npu", name, schema, answer, fake=fake, host=host)
        base = name.partition(".")[0]
        setattr(module, base, getattr(torch.ops.npu, base))
    fusion_gradients.register()
    sdpa.register()
    load = torch.ops.load_library
    torch.ops.load_library = lambda path: _load(str(path)) if "libPTAExtensionOPS" in str(path) else load(path)
    if current().precisions:
        quant_attention.install()


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
