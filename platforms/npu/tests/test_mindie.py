"""npu:mindie: what is refused and why, how documents reach the op, the shape that a mask takes; needs no device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_npu import NpuOptions, mindie
from polyattn_npu.mindie_forward import exact
from polyattn_npu.options import FA_TYPE, LASER

A2 = Machine(
    "npu", "npu", arch="A2", versions={"torch": "2.13.0", "mindiesd": "3.1.0", "einops": "0.8", "safetensors": "0.5"},
    build_facts={"mindiesd_plugins": ("2.7", "2.13")},
)  # fmt: skip
DUO, A5 = replace(A2, arch="310P"), replace(A2, arch="A5")


def asked(
    kind: str = "dense", *, samples: int = 2, rows: int = 9, heads: int = 4, kv_heads: int = 4, dim: int = 64,
    v_dim: int = 64, dtype: str = "float16", **facts: Any,
) -> Request:  # fmt: skip
    lead = () if kind == "packed" else (samples,)
    q, k, v = (
        TensorFacts.contiguous((*lead, rows, *shape), dtype)
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )
    return Request(q, k, v, device="npu:0", structure_kind=kind, scale=0.125, **facts)


def reasons(request: Request, machine: Machine = A2) -> str:
    decision = resolve(request, machine, [mindie.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


def options(**stated: Any) -> dict[str, Any]:
    return {"options": (NpuOptions(**stated),)}


PACKED = StructureFacts(documents=3)
ON_DEVICE = StructureFacts(documents=3, host=False)
#: What to do where prompt_flash_attn was asked for by name.
OUT = "leave op_type out"


@pytest.mark.parametrize(
    "request_",
    [
        asked(),
        asked(kv_heads=2),
        asked(v_dim=32),
        asked(dim=512, v_dim=512),
        asked(dtype="float32"),
        asked(**options(op_layout="BSH")),
        asked("packed", structure_facts=PACKED, **options(op_layout="BSND")),
        asked(**options(op_layout="BNSD", op_type="fused_attn_score")),
        asked(**options(opt_mode="static")),
        asked(**options(op_type="prompt_flash_attn")),
        asked("packed", structure_facts=PACKED),
        asked("packed", structure_facts=PACKED, causal=True, kv_heads=1),
        asked("packed", structure_facts=PACKED, rows=2**20, **options(opt_mode="manual")),
        asked("key_padding", samples=1024, rows=2**10),
        asked("mask", structure_facts=StructureFacts(mask_dtype="bool"), causal=True),
    ],
)
def test_what_is_taken(request_) -> None:
    assert reasons(request_) == ""


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked(v_dim=128), ("value head_dim 128", "64")),
        (asked(dim=576, v_dim=576), ("head_dim 576",)),
        (asked(heads=512, kv_heads=512), ("512 query heads", "256")),
        (asked(grad=True), ("gradients",)),
        (asked(lse=True), ("LSE",)),
        (asked(capturing=True), ("graph capture",)),
        (asked(deterministic=True), ("deterministic",)),
        (asked("packed", structure_facts=ON_DEVICE), ("cu_seqlens", "host", "check=True")),
        (asked("packed", structure_facts=StructureFacts(documents=5000)), ("5000 documents", "1024")),
        (asked("key_padding", structure_facts=ON_DEVICE), ("KeyPadding", "check=True")),
        (asked("bias", structure_facts=StructureFacts(mask_dtype="float16")), ("bias",)),
        (asked(**options(opt_mode="runtime")), ("runtime", "swallows", "'manual'")),
        (asked(**options(op_type=LASER)), ("npu:laser",)),
        (asked(**options(opt_mode="static", op_layout="BNSD")), ("static", "leave op_type and op_layout out")),
        (asked(kv_heads=2, **options(op_layout="BSH")), ("BSH", "2 KV heads for 4", "'BSND'")),
        (asked(v_dim=32, **options(op_layout="BSH")), ("BSH", "values of 32")),
        (asked(kv_heads=2, **options(op_type="prompt_flash_attn")), ("2 KV heads", "GQA", OUT)),
        (asked(dtype="float32", **options(op_type="prompt_flash_attn")), ("float32", OUT)),
        (asked(dim=40, v_dim=40, **options(op_type="prompt_flash_attn")), ("multiple of 16", "40", OUT)),
        (asked("mask", **options(op_type="prompt_flash_attn")), ("rows that a mask hides", OUT)),
        (asked("packed", structure_facts=PACKED, **options(op_type="prompt_flash_attn")), ("no packed form",)),
        (
            asked("packed", structure_facts=PACKED, **options(opt_mode="runtime")),
            ("'runtime'", "leave it out"),
        ),
        (asked("packed", structure_facts=PACKED, **options(opt_mode="static")), ("'static'", "leave it out")),
        (asked("packed", structure_facts=PACKED, **options(op_layout="BSH")), ("op_layout='BSH'", "TND alone")),
        (asked("key_padding", **options(opt_mode="runtime")), ("opt_mode='runtime'",)),
        (asked("key_padding", **options(op_layout="BNSD")), ("op_layout='BNSD'",)),
        (asked("key_padding", rows=2**20), ("2097152 rows", "1048576")),
        (asked("key_padding", samples=1025), ("1025 documents", "1024")),
        (asked(rows=2**20 + 1), ("1048577 rows",)),
        (asked(**options(laser_input_scale=2)), ("laser_input_scale",)),
    ],
)
def test_a_refusal_says_why(request_, words) -> None:
    told = reasons(request_)
    assert all(word in told for word in words), told


def test_each_device_class_gets_its_own_op() -> None:
    assert reasons(asked(), DUO) == ""
    assert "310P has prompt_flash_attn only" in reasons(asked(**options(op_type="fused_attn_score")), DUO)
    assert "310P" in reasons(asked(**options(opt_mode="static")), DUO)
    assert "takes no boundaries: npu:blocked needs none" in reasons(asked("packed", structure_facts=PACKED), DUO)
    assert "npu:blocked takes it" in reasons(asked(kv_heads=2), DUO)
    assert reasons(asked(), A5) == ""
    assert "runs fused_attn_score" in reasons(asked(**options(op_type="prompt_flash_attn")), A5)
    assert "soc123" in reasons(asked(), replace(A2, arch="soc123"))
    assert reasons(asked(), replace(A2, arch="")) == ""


def test_a_causal_prefix_runs_by_boundaries() -> None:
    facts = StructureFacts(queries="same", prefix=True, common_prefix=5)
    prefix, causal = (asked("prefix_kv", structure_facts=facts, causal=causal) for causal in (False, True))
    assert reasons(prefix) == reasons(causal) == reasons(prefix, DUO) == ""
    assert "takes no boundaries" in reasons(causal, DUO)
    forced = replace(A2, env={FA_TYPE: LASER})
    assert FA_TYPE in reasons(prefix, forced)
    assert reasons(causal, forced) == ""


def test_the_vendors_variable_is_never_overruled() -> None:
    forced = replace(A2, env={FA_TYPE: LASER})
    told = reasons(asked(), forced)
    assert f"{FA_TYPE}='{LASER}'" in told
    assert "opt_mode='static'" in told
    assert reasons(asked(**options(opt_mode="static")), forced) == ""
    assert reasons(asked("packed", structure_facts=PACKED), forced) == ""
    assert reasons(asked(), replace(A2, env={FA_TYPE: "fused_attn_score"})) == ""


def test_what_is_not_installed_is_named() -> None:
    bare = {"torch": "2.13.0", "mindiesd": "3.1.0", "safetensors": "0.5"}
    assert "pip install einops" in reasons(asked(), replace(A2, versions=bare))
    newer = replace(A2, versions={**A2.versions, "torch": "2.14.0+cpu"})
    assert "plugins for torch 2.7, 2.13, and this is 2.14: install" in reasons(asked(), newer)
    assert reasons(asked(), replace(newer, env={"MINDIESD_PLUGIN_VARIANT": "torch213"})) == ""


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ((1, 1, 1, 7), (1, 1, 5, 7)),
        ((2, 1, 1, 7), (2, 1, 5, 7)),
        ((1, 4, 5, 7), (2, 4, 5, 7)),
        ((2, 4, 1, 7), (2, 4, 5, 7)),
        ((1, 1, 5, 7), (1, 1, 5, 7)),
    ],
)
def test_a_mask_has_exactly_a_shape_of_the_op(given, taken) -> None:
    keep = torch.ones(given, dtype=torch.bool)
    keep[..., 0, :] = False
    shaped = exact(keep, 2, 5)
    assert tuple(shaped.keep.shape) == taken
    assert torch.equal(
        shaped.fully_masked.expand(2, 5, 4, 1), shaped.keep.any(-1).logical_not().expand(2, 4, 5).mT[..., None]
    )


def test_a_variable_is_told_as_what_mindie_sd_makes_of_it() -> None:
    on_a5 = reasons(asked(), replace(A5, env={FA_TYPE: "prompt_flash_attn"}))
    assert "unset it" in on_a5
    assert "op_type=" not in on_a5, "which A5 refuses as well"
    assert "op_type='prompt_flash_attn'" in reasons(asked(), replace(A2, env={FA_TYPE: "prompt_flash_attn"}))
    unknown = reasons(asked(), replace(A2, env={FA_TYPE: "garbage"}))
    assert "no op of MindIE-SD's manual mode, which raises for it" in unknown
    assert "replaces" not in reasons(asked(), replace(A2, env={FA_TYPE: LASER})), "for short sequences it does not"
