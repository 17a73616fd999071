"""npu:quant: what is refused and why; then quant_attention as MindIE-SD's sources to come have it."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.mindie_scenes import passed, scenes_of
from polyattn.vendor import Accepted, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_npu import NpuOptions, quant
from polyattn_npu.quant_rotation import rotation

A5 = Machine(
    "npu", "npu", arch="A5", versions={"torch": "2.13.0", "mindiesd": "3.2.0", "einops": "0.8", "safetensors": "0.5"},
    build_facts={"mindiesd_plugins": ("2.13",), "mindiesd_quant_attention": ("fp8", "mxfp8", "mxfp4")},
)  # fmt: skip


def asked(
    method: str | None = "fp8", kind: str = "dense", *, dim: int = 128, v_dim: int = 128, **facts: Any
) -> Request:
    q, k, v = (TensorFacts.contiguous((2, 512, 4, size), facts.get("dtype", "bfloat16")) for size in (dim, dim, v_dim))
    facts.pop("dtype", None)
    return Request(q, k, v, device="npu:0", structure_kind=kind, scale=0.1, quant=method, **facts)


def reasons(request: Request, machine: Machine = A5) -> str:
    decision = resolve(request, machine, [quant.backend()])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


@pytest.mark.parametrize(
    "request_",
    [
        asked(),
        asked("mxfp8"),
        asked("mxfp4"),
        asked(dtype="float32"),
        asked(kind="prefix_kv", structure_facts=StructureFacts(queries="all", prefix=True, common_prefix=100)),
        asked(options=(NpuOptions(op_layout="BNSD"),)),
    ],
)
def test_what_is_taken(request_) -> None:
    assert reasons(request_) == ""


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked(None), ("always quantises", "quant='mxfp4'")),
        (asked("int8"), ("'int8'", "fp8, mxfp4, mxfp8")),
        (asked(dim=96, v_dim=96), ("head_dim 96 not in (32, 64, 128, 256, 512)",)),
        (asked("mxfp4", dim=512, v_dim=512), ("head_dim 512",)),
        (asked(v_dim=64), ("value head_dim 64",)),
        (asked(causal=True), ("causal",)),
        (asked(window=(4, 4)), ("window",)),
        (asked(lse=True), ("LSE",)),
        (asked(grad=True), ("gradients",)),
        (asked(kind="mask", structure_facts=StructureFacts(mask_dtype="bool")), ("'mask'",)),
        (asked(options=(NpuOptions(op_layout="BSH"),)), ("'BSND' or 'BNSD'", "'BSH'")),
        (asked(options=(NpuOptions(op_type="fused_attn_score"),)), ("op_type",)),
    ],
)
def test_a_refusal_says_why(request_, words) -> None:
    told = reasons(request_)
    assert all(word in told for word in words), told


def test_what_the_machine_lacks() -> None:
    assert "runs on A5, and this is A3" in reasons(asked(), replace(A5, arch="A3"))
    facts = {"mindiesd_plugins": ("2.13",)}
    earlier = replace(A5, build_facts={**facts, "mindiesd_quant_attention": ("fp8", "mxfp8")})
    assert reasons(asked("mxfp8"), earlier) == ""
    assert "takes fp8, mxfp8, not mxfp4" in reasons(asked("mxfp4"), earlier)
    released = replace(A5, build_facts={**facts, "mindiesd_quant_attention": ()})
    assert "has no quant_attention" in reasons(asked(), released)
    assert "mindiesd is not installed" in reasons(asked(), replace(A5, versions={"torch": "2.13.0"}))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def ran(*tensors: torch.Tensor, **stated: Any) -> tuple[torch.Tensor, list[Any]]:
    from tests.emulators.npu.calls import recording

    with recording() as log:
        out = pa.attention(*(tensor.npu() for tensor in tensors), backend="quant", **stated)
    return out.cpu().double(), [call for call in log if "dynamic" not in call.op and "metadata" not in call.op]


def error(found: torch.Tensor, *tensors: torch.Tensor, **stated: Any) -> float:
    """The norm of the error over that of the output."""
    expected = pa.reference_attention(*tensors, **stated).double()
    return float((found - expected).norm() / expected.norm())


LIMITS = {"fp8": 0.1, "mxfp8": 0.1, "mxfp4": 0.35}


def scene_each_precision_is_what_was_asked() -> None:
    q, k = drawn(1, 96, 4, 128), drawn(1, 512, 2, 128)
    ops = {"fp8": "fused_infer_attention_score_v2", "mxfp8": "npu_fused_infer", "mxfp4": "quant_flash_attn"}
    for method, op in ops.items():
        for scale in (None, 0.0, -0.1):
            out, calls = ran(q, k, k, quant=method, scale=scale)
            (call,) = calls
            assert op in call.op
            assert error(out, q, k, k, scale=scale) < LIMITS[method]
            if scale is None:
                assert error(out, q, k, k) > LIMITS[method] / 20  # it was quantised


def rounded(rows: torch.Tensor, axis: int) -> torch.Tensor:
    """float64 rows once in mxfp8: e4m3 in groups of 32 along an axis, each under its power of two."""
    groups = rows.movedim(axis, -1).unflatten(-1, (-1, 32))
    shared = (groups.abs().amax(-1, keepdim=True).log2().floor() - 8).exp2()
    codes = (groups / shared).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (codes.double() * shared).flatten(-2).movedim(-1, axis)


def scene_mxfp8_costs_what_rounding_costs_at_every_head_dim_and_spread_of_the_logits() -> None:
    for dim, spread in product((32, 64, 128, 256, 512), (1.0, 3.0)):
        q, k, v = drawn(1, 40, 2, dim), drawn(1, 512, 2, dim), drawn(1, 512, 2, dim)
        scale = spread * dim**-0.5
        found = error(ran(q, k, v, quant="mxfp8", scale=scale)[0], q, k, v, scale=scale)
        turned = (t.double() @ rotation(torch.device("cpu"), torch.float64, dim) for t in (q, k))
        alone = pa.reference_attention(*(rounded(t, -1) for t in turned), rounded(v.double(), 1), scale=scale)
        assert found < min(LIMITS["mxfp8"], 1.15 * error(alone, q, k, v, scale=scale)), (dim, spread, found)


def scene_the_rotation_spreads_outliers() -> None:
    q, k = drawn(1, 128, 2, 128), drawn(1, 512, 2, 128)
    q[..., 5] *= 30
    k[..., 5] *= 30
    turned, _ = ran(q, k, k, quant=pa.Quant("mxfp4"), scale=0.02)
    plain, _ = ran(q, k, k, quant=pa.Quant("mxfp4", rotate=False), scale=0.02)
    assert error(turned, q, k, k, scale=0.02) < 0.8 * error(plain, q, k, k, scale=0.02)


def scene_a_sample_has_its_own_call_where_it_needs_one() -> None:
    for method, keys, count in (("fp8", 512, 3), ("mxfp8", 500, 3), ("mxfp8", 512, 1), ("mxfp4", 500, 1)):
        q, k = drawn(3, 40, 2, 64), drawn(3, keys, 2, 64)
        out, calls = ran(q, k, k, quant=method)
        assert len(calls) == count
        assert error(out, q, k, k) < LIMITS[method]


def scene_keys_that_are_not_there_do_not_count() -> None:
    import mindiesd

    q, k = drawn(2, 40, 2, 64), drawn(2, 100, 2, 64)
    alone = mindiesd.quant_attention(q.npu(), k.npu(), k.npu(), "mxfp4", layout="BSND").cpu().double()
    assert error(alone, q, k, k) > 0.5  # 412 keys that are not there
    for asked_for in (q, q.float()):
        tensors = (asked_for, *[k.to(asked_for.dtype)] * 2)
        for rotate in (True, False):
            out, _ = ran(*tensors, quant=pa.Quant("mxfp4", rotate=rotate))
            assert error(out, *tensors) < LIMITS["mxfp4"]


def scene_keys_that_are_not_there_do_not_count_where_all_others_score_far_below_them() -> None:
    q, k, v = (
        torch.full((1, 8, 2, 128), 3.0).bfloat16(),
        torch.full((1, 700, 2, 128), -3.0).bfloat16(),
        drawn(1, 700, 2, 128),
    )
    for rotate in (False, True):
        for keys in (k, k + torch.randn(k.shape, generator=torch.Generator().manual_seed(5)).bfloat16()):
            out, _ = ran(q, keys, v, quant=pa.Quant("mxfp4", rotate=rotate))
            assert error(out, q, keys, v) < LIMITS["mxfp4"], (rotate, error(out, q, keys, v))


def scene_what_undoes_them_costs_no_precision_however_few_keys_there_are() -> None:
    for keys in (1, 3, 40, 480):
        q, k, v = drawn(1, 40, 2, 64), drawn(1, keys, 2, 64), drawn(1, keys, 2, 64) + 1.0
        out, _ = ran(q, k, v, quant="mxfp4")
        k, v = (t.repeat(1, math.lcm(keys, 512) // keys, 1, 1) for t in (k, v))  # the same softmax, none is filled up
        plain, calls = ran(q, k, v, quant="mxfp4")
        assert calls[0].arguments["key"].shape[-1] == 32, "taken as they are"
        assert error(out, q, k, v) < 1.2 * error(plain, q, k, v), keys


def scene_twice_the_head_dim_is_told_once() -> None:
    from polyattn_npu import quant_forward

    quant_forward._tell_once.cache_clear()
    q, k = drawn(1, 40, 2, 64), drawn(1, 100, 2, 64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ran(q, drawn(1, 512, 2, 64), drawn(1, 512, 2, 64), quant="mxfp4")
        assert told == []
        for _ in range(2):
            _, (call,) = ran(q, k, k, quant="mxfp4")
    assert call.arguments["key"].shape[-1] == 64, "two codes a byte, of 128"
    assert ["a multiple of 512 keys" in str(one.message) for one in told] == [True]


def scene_layouts_and_dtypes() -> None:
    q, k = drawn(1, 40, 4, 64), drawn(1, 512, 2, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensors = [t.to(dtype) for t in (q, k, k)]
        plain = pa.attention(*(t.npu() for t in tensors), quant="mxfp4", backend="quant")
        assert plain.dtype == dtype
        other, _ = ran(*tensors, quant="mxfp4", options=NpuOptions(op_layout="BNSD"))
        torch.testing.assert_close(other, plain.cpu().double(), atol=1e-2, rtol=0)


def scene_padding_is_sliced_off() -> None:
    q = drawn(2, 96, 2, 64)
    filled = q.clone()
    filled[:, 70:] = float("nan")
    for queries in ("same", "all"):
        kept = pa.KeyPadding.from_lengths([70, 70], 96, queries=queries)
        for method, limit in LIMITS.items():
            out, _ = ran(q, filled, filled, structure=kept, quant=method)
            assert error(out, q, filled, filled, structure=kept) < limit


def scene_an_earlier_build_has_no_mxfp4() -> None:
    from polyattn_npu import mindie_build
    from tests.emulators.npu.stack import using

    here = replace(A5, versions={"mindiesd": "3.1.0"}, build_facts={})
    assert mindie_build.without_precision("mxfp4", here) == ()
    mindie_build._taken.cache_clear()
    try:
        with using(mindiesd="unreleased-fp8"):
            assert mindie_build.without_precision("mxfp8", here) == ()
            (told,) = mindie_build.without_precision("mxfp4", here)
        assert "takes fp8, mxfp8, not mxfp4" in told
    finally:
        mindie_build._taken.cache_clear()


def scene_skipped_steps_are_recorded() -> None:
    q = drawn(1, 32, 2, 64).npu()
    skipping = pa.Quant("fp8", skip_steps=(0,))
    for around in (nullcontext(), pa.step(0, 4)):
        with pa.record_routes() as log, around:
            pa.attention(q, q, q, quant=skipping)
        assert "skipped" in log.to_json()


@pytest.mark.emulated
def test_the_released_package_has_no_such_function() -> None:
    passed("platforms.npu.tests.test_mindie_faults", "scene_35_a_quantised_request_is_never_ignored", soc="A5")


@pytest.mark.emulated
@pytest.mark.parametrize("scene", scenes_of(globals()))
def test_scene(scene: str) -> None:
    passed(__name__, scene, soc="A5", mindiesd="unreleased", lint=True)
