"""npu:laser: when it is asked, what it refuses and why, what its inputs are divided by; then the emulated kernel."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.mindie_scenes import passed, scenes_of, variable
from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_npu import NpuOptions, laser
from polyattn_npu.laser_range import input_scale, largest_score
from polyattn_npu.options import FA_TYPE, LASER
from polyattn_npu.order import order

A2 = Machine(
    "npu", "npu", arch="A2", versions={"torch": "2.13.0", "mindiesd": "3.1.0", "einops": "0.8", "safetensors": "0.5"},
    build_facts={"mindiesd_plugins": ("2.13",)},
)  # fmt: skip


def asked(queries: int = 4096, keys: int = 4096, kind: str = "dense", dim: int = 128, **facts: Any) -> Request:
    lead = () if kind == "packed" else (1,)
    dtype = facts.pop("dtype", "bfloat16")
    q, k = (TensorFacts.contiguous((*lead, rows, 4, dim), dtype) for rows in (queries, keys))
    return Request(q, k, k, device="npu:0", structure_kind=kind, **{"scale": dim**-0.5} | facts)


def reasons(request: Request, machine: Machine = A2) -> str:
    decision = resolve(request, machine, [laser.backend()])[0]
    told = "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)
    assert "check raised" not in told
    return told


def options(**stated: Any) -> dict[str, Any]:
    return {"options": (NpuOptions(**stated),)}


def kept(length: int, queries: str) -> dict[str, Any]:
    return {"structure_facts": StructureFacts(queries=queries, prefix=True, common_prefix=length)}


def test_it_comes_last_unless_it_is_asked_for() -> None:
    assert order(asked(), A2)[-1] == "laser"
    assert order(asked(**options(op_type=LASER)), A2)[0] == "laser"
    assert order(asked(**options(laser_max_abs=100.0)), A2)[0] == "laser"
    assert order(asked(), replace(A2, env={FA_TYPE: LASER}))[0] == "laser"


@pytest.mark.parametrize(
    "request_",
    [
        asked(),
        asked(2048, 131072),
        asked(kind="packed", structure_facts=StructureFacts(documents=1)),
        asked(kind="prefix_kv", **kept(2048, "all")),
        asked(kind="prefix_kv", **kept(2048, "same")),
        asked(**options(op_type=LASER, op_layout="BNSD", opt_mode="manual")),
        asked(**options(laser_input_scale=8)),
        asked(**options(laser_max_abs=7.9)),
        asked(**options(laser_max_abs=3.9), dtype="float16"),
        asked(**options(laser_max_abs=1e4), scale=1e-8),
        asked(scale=0.0),
        asked(scale=-0.1),
    ],
)
def test_what_is_taken(request_) -> None:
    assert reasons(request_) == ""


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked(2047), ("2047 queries", "2048", "fused_attn_score")),
        (asked(4096, 512), ("512 keys", "2048")),
        (asked(200000), ("200000 queries", "131072")),
        (asked(kind="prefix_kv", **kept(1000, "all")), ("1000 keys",)),
        (asked(kind="prefix_kv", **kept(1000, "same")), ("1000 queries and 1000 keys",)),
        (asked(dim=160), ("head_dim 160",)),
        (asked(dtype="float32"), ("float32",)),
        (asked(dtype="float32", **options(laser_max_abs=300.0)), ("dtype float32 not in",)),
        (asked(causal=True), ("causal",)),
        (asked(lse=True), ("LSE",)),
        (asked(grad=True), ("gradients",)),
        (asked(kind="mask", structure_facts=StructureFacts(mask_dtype="bool")), ("'mask'",)),
        (asked(kind="packed", structure_facts=StructureFacts(documents=2)), ("2 documents", "[real, pad]")),
        (asked(kind="packed", structure_facts=StructureFacts(documents=1, host=False)), ("real_and_pad",)),
        (asked(**options(op_layout="BSND")), ("'BNSD' only", "'BSND'")),
        (asked(**options(opt_mode="static")), ("'static'", "'manual'")),
        (asked(**options(op_type="fused_attn_score")), ("fused_attn_score", "another op")),
        (asked(**options(laser_max_abs=1e4, laser_input_scale=4)), ("laser_input_scale=4", "65504", "=512 suffices")),
        (asked(**options(laser_max_abs=1e9)), ("16384", "laser_max_abs", "npu:fusion")),
        (asked(**options(laser_input_scale=2**15)), ("16384", "laser_input_scale")),
        (asked(**options(laser_input_scale=2**13)), ("divided by 8192", "too coarsely")),
        (asked(**options(laser_max_abs=4e4)), ("too coarsely",)),
        (asked(**options(laser_max_abs=300.0)), ("logits reach 9e+04", "float32", "laser_input_scale=16 in its place")),
        (asked(**options(laser_max_abs=8.1), dim=64), ("logits reach 65.6", "laser_input_scale=1 in its place")),
        (asked(**options(laser_max_abs=4.1), dtype="float16"), ("logits reach 16.8 by independent signs", "11 times")),
        (asked(keys=4100, scale=1e-6), ("scale 1e-06", "multiple of 256", "laser_input_scale=32")),
        (asked(keys=4100, scale=-5e-324), ("scale -5e-324", "multiple of 256")),
    ],
)
def test_a_refusal_says_why(request_, words) -> None:
    told = reasons(request_)
    assert all(word in told for word in words), told


SUGGESTED = re.compile(r"laser_input_scale=(\d+)(?: suffices|, avoids)")


def suggestions() -> Iterator[tuple[Request, NpuOptions, int]]:
    """What refusals over a range of scales and declared bounds suggest: the request, its options, the input scale."""
    scales = [sign * 10.0**power for power in range(-16, 3) for sign in (1, -1)] + [0.0]
    stated = [NpuOptions(), *(NpuOptions(laser_input_scale=2**power) for power in (0, 4, 10))]
    for max_abs in (1.0, 25.0, 700.0, 9e3, 4e4, 1e6):
        stated += [NpuOptions(laser_max_abs=max_abs, laser_input_scale=2**power) for power in (0, 4, 10)]
    for scale, option, keys, dim in product(scales, stated, (4096, 4100), (64, 128)):
        request = asked(keys=keys, dim=dim, scale=scale, options=(option,))
        if found := SUGGESTED.search(reasons(request)):
            yield request, option, int(found[1])


def test_an_input_scale_that_a_refusal_suggests_is_taken_and_the_least_that_is() -> None:
    for request, option, suggested in suggestions():
        assert reasons(replace(request, options=(replace(option, laser_input_scale=suggested),))) == ""
        halved = replace(request, options=(replace(option, laser_input_scale=suggested // 2),))
        assert reasons(halved) != "", (option, request.scale)
    kinds = {("max_abs" if option.laser_max_abs else "scale") for _, option, _ in suggestions()}
    assert kinds == {"max_abs", "scale"}


def test_an_input_scale_in_the_place_of_a_declared_range_is_taken_as_it_is() -> None:
    for max_abs, keys in product((8.1, 25.0, 300.0, 9e3), (4096, 4100)):
        told = reasons(asked(keys=keys, **options(laser_max_abs=max_abs)))
        stated = re.search(r"laser_input_scale=(\d+) in its place", told)
        assert stated, told
        assert reasons(asked(keys=keys, **options(laser_input_scale=int(stated[1])))) == ""


def test_no_input_scale_is_suggested_where_each_is_refused() -> None:
    coarse = reasons(asked(**options(laser_max_abs=4e4, laser_input_scale=2)))
    assert "too coarsely" in coarse
    assert "suffices" not in coarse
    tiny = reasons(asked(keys=4100, scale=1e-14))
    assert "multiple of 256 keys avoids it" in tiny
    assert "laser_input_scale" not in tiny


def test_other_devices_and_variables() -> None:
    for arch in ("A5", "310P"):
        assert f"runs on A2 and A3, and this is {arch}" in reasons(asked(), replace(A2, arch=arch))
    assert reasons(asked(), replace(A2, arch="A3")) == ""
    assert FA_TYPE in reasons(asked(), replace(A2, env={FA_TYPE: "fused_attn_score"}))
    assert "makes MindIE-SD raise" in reasons(asked(), replace(A2, env={FA_TYPE: "garbage"}))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("max_abs", [1.0, 20.0, 22.7, 1000.0, 5e4])
def test_the_least_power_of_two_that_keeps_scores_finite(head_dim, max_abs) -> None:
    factor = input_scale(NpuOptions(laser_max_abs=max_abs), head_dim, 4096, 0.1)
    assert largest_score(max_abs / factor, head_dim) <= 65504
    assert factor == 1 or largest_score(2 * max_abs / factor, head_dim) > 65504
    worst = torch.full((head_dim,), max_abs / factor).half().double().square().sum()
    assert bool(worst.half().isfinite())


def test_scores_stay_above_the_keys_that_a_block_lacks() -> None:
    stated = NpuOptions(laser_max_abs=22.0)
    assert input_scale(stated, 128, 4096, 0.1) == 1  # 61952 is finite
    assert input_scale(stated, 128, 4100, 0.1) == 2  # but -61952 lies below -60000


def test_rounding_to_float16_is_counted() -> None:
    max_abs = 22.62  # 128 * 22.62**2 is below 65504, and 22.625, to which it is rounded, makes 65522: infinite
    assert 128 * max_abs**2 < 65504
    assert bool((128 * torch.tensor(max_abs).half().double() ** 2).half().isinf())
    assert input_scale(NpuOptions(laser_max_abs=max_abs), 128, 4096, 0.1) == 2


def test_a_stated_factor_counts() -> None:
    assert input_scale(NpuOptions(laser_input_scale=8, laser_max_abs=1.0), 128, 4096, 0.1) == 8
    assert input_scale(NpuOptions(), 128, 4096, 0.1) == 1


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def ran(*tensors: torch.Tensor, **asked_for: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    from tests.emulators.npu import registry

    registry.calls.clear()
    out = pa.attention(*(tensor.npu() for tensor in tensors), **asked_for)
    (call,) = registry.calls
    return out.cpu().double(), {"op": call.op, **call.arguments}


def close(found: torch.Tensor, *tensors: torch.Tensor, atol: float = 2e-2, **asked_for: Any) -> None:
    torch.testing.assert_close(found, pa.reference_attention(*tensors, **asked_for).double(), atol=atol, rtol=0)


def scene_by_name_option_or_variable_and_never_unasked() -> None:
    q, k = drawn(1, 2048, 2, 64), drawn(1, 2100, 1, 64)
    out, call = ran(q, k, k, backend="laser")
    assert call["op"] == "mindiesd::la"
    close(out, q, k, k)
    assert ran(q, k, k, options=NpuOptions(op_type=LASER))[1]["op"] == "mindiesd::la"
    assert ran(q, k, k)[1]["op"] != "mindiesd::la"
    with variable(FA_TYPE, LASER):
        assert ran(q, k, k)[1]["op"] == "mindiesd::la"
        keep = torch.ones(1, 2100, dtype=torch.bool)
        keep[0, ::3] = False
        masked, call = ran(q, k, k, structure=pa.Mask(keep))
        assert call["op"] != "mindiesd::la"  # it would ignore the mask
        close(masked, q, k, k, structure=pa.Mask(keep))


def scene_bf16_outliers_overflow_and_the_scaling_cures_it() -> None:
    q, v = drawn(1, 2048, 1, 64) * 256, drawn(1, 2048, 1, 64)
    loud = {"scale": 1e-6, "backend": "laser"}
    from tests.emulators.npu.stack import using

    with using(lint=False):
        assert bool(ran(q, q, v, **loud)[0].isnan().any())
    for stated in ({"laser_max_abs": 1300.0}, {"laser_input_scale": 64}):
        out, call = ran(q, q, v, **loud, options=NpuOptions(**stated))
        assert call["scale_value"] == 1e-6 * 64 * 64
        close(out, q, q, v, scale=1e-6)


def scene_a_declared_range_that_is_taken_is_exact_to_its_dtype() -> None:
    for dtype, max_abs, tolerance in ((torch.float16, 3.98, 5e-3), (torch.bfloat16, 7.9, 2e-2)):
        q, k = ((drawn(1, rows, 1, 64).float() / 2**0.5).erf() * max_abs for rows in (2048, 2049))  # evenly spread
        q, k, v = q.to(dtype), k.to(dtype), drawn(1, 2049, 1, 64).to(dtype)
        want = pa.reference_attention(q, k, v)
        found = ran(q, k, v, backend="laser", options=NpuOptions(laser_max_abs=max_abs + 0.02))[0]
        assert float((found - want).abs().max()) <= tolerance * float(want.abs().max())


def scene_entries_of_one_sign_lose_more_than_a_declared_range_assumes_and_no_more_than_is_said() -> None:
    for dtype, max_abs, tolerance in ((torch.float16, 4.0, 5e-3), (torch.bfloat16, 8.0, 2e-2)):
        q, k = ((drawn(1, rows, 1, 64).float().tanh() * 0.1 + 0.9) * max_abs for rows in (2048, 2049))
        q, k, v = q.to(dtype), k.to(dtype), drawn(1, 2049, 1, 64).to(dtype)
        want = pa.reference_attention(q, k, v)
        found = ran(q, k, v, backend="laser", options=NpuOptions(laser_max_abs=max_abs))[0]
        lost = float((found - want).abs().max()) / float(want.abs().max())
        assert tolerance < lost <= 64**0.5 * tolerance


def scene_prefixes_and_one_document() -> None:
    q = drawn(1, 2300, 2, 64)
    filled = q.clone()
    filled[:, 2060:] = float("nan")
    for queries in ("all", "same"):
        prefix = pa.KeyPadding.from_lengths([2060], 2300, queries=queries)
        out, call = ran(q, filled, filled, structure=prefix, backend="laser")
        assert call["pre_tokens"] == 2304 - 2060
        close(out, q, filled, filled, structure=prefix)
    document = pa.Packed.real_and_pad(2060, 2300)
    out, call = ran(q[0], filled[0], filled[0], structure=document, backend="laser")
    assert call["op"] == "mindiesd::la"
    assert bool(out[2060:].eq(0).all())
    close(out, q[0], filled[0], filled[0], structure=document)


def scene_a_short_document_is_told_of() -> None:
    q = drawn(2300, 2, 64)
    document = pa.Packed.real_and_pad(600, 2300)
    with pytest.warns(UserWarning, match="fused_attn_score"):
        out, call = ran(q, q, q, structure=document, backend="laser")
    assert call["op"] == "npu::npu_fusion_attention"
    close(out, q, q, q, structure=document)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        ran(q, q, q, structure=document, backend="laser")


def scene_scales_that_are_not_positive() -> None:
    q, k = drawn(1, 2048, 1, 64), drawn(1, 2100, 1, 64)
    for scale in (0.0, -0.2):
        out, _ = ran(q, k, k, scale=scale, backend="laser")
        close(out, q, k, k, scale=scale)


@pytest.mark.emulated
@pytest.mark.parametrize("scene", scenes_of(globals()))
def test_scene(scene: str) -> None:
    passed(__name__, scene, soc="A2", lint=True)
