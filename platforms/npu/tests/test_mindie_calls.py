"""npu:mindie on the emulated device: what reaches the op through the real MindIE-SD, and what comes back."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.mindie_scenes import passed, scenes_of, variable
from polyattn_npu import NpuOptions
from polyattn_npu.options import FA_TYPE, LASER

pytestmark = pytest.mark.emulated


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ran(*tensors: torch.Tensor, backend: str = "mindie", **asked: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The output in float64 on the CPU, and the arguments of the one native call behind it."""
    from tests.emulators.npu import device, registry

    on_device = [tensor.npu() for tensor in tensors]
    registry.calls.clear()
    device.host_reads.clear()
    out = pa.attention(*on_device, backend=backend, **asked)
    assert device.host_reads == []
    (call,) = registry.calls
    return out.cpu().double(), {"op": call.op, **call.arguments}


def close(found: torch.Tensor, *tensors: torch.Tensor, **asked: Any) -> None:
    expected = pa.reference_attention(*tensors, **asked)
    torch.testing.assert_close(found, expected.double(), atol=4e-3, rtol=0)


def scene_the_scale_reaches_the_op_as_a_float() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 7, 4, 32)
    for scale in (0.37, 1, 0.0, -0.2, None):
        out, call = ran(q, k, k, scale=scale)
        reached = call.get("scale", 1.0)  # torch leaves out what equals the schema's default
        assert type(reached) is float
        assert reached == (32**-0.5 if scale is None else abs(scale) or 1.0)  # what is not above 0 is moved into q
        close(out, q, k, k, scale=scale)


def scene_layouts_and_modes() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 7, 4, 32)
    for layout in ("BNSD", "BSND", "BSH"):
        out, call = ran(q, k, k, options=(NpuOptions(op_layout=layout),))
        assert call["input_layout"] == layout
        close(out, q, k, k)
    out, call = ran(q, k, k)
    assert (call["input_layout"], call["op"], call.get("atten_mask")) == ("BSND", "npu::npu_fusion_attention", None)
    out, call = ran(q, k, k, options=(NpuOptions(opt_mode="static"),))
    assert call["input_layout"] == "BNSD"
    close(out, q, k, k)
    out, call = ran(q, k, k, options=NpuOptions(op_type="prompt_flash_attn", op_layout="BNSD"))
    assert call["op"] == "npu::npu_prompt_flash_attention"
    close(out, q, k, k)


def scene_fewer_kv_heads_and_narrower_values() -> None:
    q, k, v = drawn(2, 5, 6, 64), drawn(2, 7, 2, 64), drawn(2, 7, 2, 32)
    for layout in ("BNSD", "BSND"):
        out, call = ran(q, k, v, options=NpuOptions(op_layout=layout))
        assert call["head_num"] == 6
        close(out, q, k, v)


def scene_a_mask_is_inverted_once_and_never_broadcast_by_the_op() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 7, 4, 32)
    keep = torch.tensor([[1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 1]], dtype=torch.bool)
    out, call = ran(q, k, k, structure=pa.Mask(keep))
    assert torch.equal(call["atten_mask"].cpu(), ~keep[:, None, None].expand(2, 1, 5, 7))
    close(out, q, k, k, structure=pa.Mask(keep))
    for shape in ((1, 1, 5, 7), (1, 4, 5, 7), (2, 4, 1, 7)):
        mask = pa.Mask(torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3)
        out, call = ran(q, k, k, structure=mask)
        assert tuple(call["atten_mask"].shape) == ((1, 1, 5, 7) if shape[:2] == (1, 1) else (2, shape[1], 5, 7))
        close(out, q, k, k, structure=mask)


def scene_a_mask_is_shaped_anew_for_causal_and_each_window() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 7, 4, 32)
    mask = pa.Mask.keys(torch.tensor([[1, 1, 1, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool))
    for rule in ({}, {"causal": True}, {"window": (2, 0)}, {"window": (1, 1)}):
        out, _ = ran(q, k, k, structure=mask, **rule)
        close(out, q, k, k, structure=mask, **rule)


def scene_a_prefix_of_keys_is_a_view() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 9, 4, 32)
    k[:, 6:] = float("nan")
    kept = pa.KeyPadding.from_lengths([6, 6], 9, queries="all")
    keys = k.npu()
    out, call = ran(q, keys, keys, structure=kept)
    assert call.get("atten_mask") is None
    assert call["key"].shape[1] == 6
    assert call["key"].untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    close(out, q, k, k, structure=kept)


def scene_documents_by_host_ends_without_a_mask() -> None:
    q = drawn(12, 4, 32)
    documents = pa.Packed.from_lengths([4, 1, 5])
    out, call = ran(q, q, q, structure=documents, scale=0.2)
    assert (call["input_layout"], call["scale"], call.get("atten_mask")) == ("TND", 0.2, None)
    for ends in (call["actual_seq_qlen"], call["actual_seq_kvlen"]):
        assert list(ends) == [4, 5, 10]
        assert all(type(end) is int for end in ends)
    assert bool(out[10:].eq(0).all())
    close(out, q, q, q, structure=documents, scale=0.2)
    out, call = ran(q, q, q, structure=documents, causal=True)
    assert call["sparse_mode"] == 3
    close(out, q, q, q, structure=documents, causal=True)
    plain = pa.Packed.real_and_pad(7, 12)
    out, call = ran(q, q, q, structure=plain)
    assert (list(call["actual_seq_qlen"]), call.get("atten_mask")) == ([7], None)
    assert bool(out[7:].eq(0).all())
    close(out, q, q, q, structure=plain)


def scene_documents_whose_rows_see_nothing() -> None:
    q, k = drawn(9, 4, 32), drawn(8, 2, 32)
    documents = pa.Packed.from_lengths([2, 4, 3], [5, 3, 0])
    for causal in (False, True):
        out, _ = ran(q, k, k, structure=documents, causal=causal)
        assert bool(out[6:].eq(0).all())
        close(out, q, k, k, structure=documents, causal=causal)


def scene_padding_that_the_host_knows() -> None:
    q = drawn(2, 6, 4, 32)
    for kept in (
        pa.KeyPadding.from_lengths([4, 2], 6),
        pa.KeyPadding.from_lengths([4, 2], 6, queries="all"),
        pa.KeyPadding.from_ranges([[(1, 3), (4, 6)], [(2, 3)]], 6, queries="all"),
        pa.KeyPadding.from_lengths([4, 0], 6),
    ):
        out, call = ran(q, q, q, structure=kept)
        assert call["input_layout"] == "TND"
        close(out, q, q, q, structure=kept)


def scene_boundaries_of_the_device_are_never_read() -> None:
    q = drawn(9, 4, 32).npu()
    ends = torch.tensor([0, 4, 9], dtype=torch.int32).npu()
    told = pa.explain(q, q, q, structure=pa.Packed.from_cu_seqlens(ends, max_q=5), backend="mindie")
    (why,) = [reasons for name, _, reasons in told.rows() if name == "npu:mindie"]
    assert "cu_seqlens" in why
    assert "check=True" in why


def scene_lengths_that_contradict_the_boundaries() -> None:
    from polyattn_npu.mindie_packed import packed

    q = drawn(9, 4, 32).npu()
    meta = pa.Packed.from_lengths([4, 5]).bind(q.device, tuple(q.shape), tuple(q.shape))
    call: dict[str, Any] = {"causal": False, "scale": 0.1, "window": None, "softcap": 0.0, "need_lse": False}
    for wrong in ({"lengths_q": (9,)}, {"lengths_q": (2, 7)}, {"lengths_k": (5, 5)}, {"lengths_q": (4, 3, 2)}):
        with pytest.raises(ValueError, match="cu_seqlens"):
            packed(q, q, q, None, meta=replace(meta, **wrong), options=(), **call)


def scene_the_vendors_variable() -> None:
    q = drawn(1, 5, 2, 32)
    with variable(FA_TYPE, LASER):
        told = pa.explain(q.npu(), q.npu(), q.npu(), backend="mindie")
        assert told.chosen is None
        assert FA_TYPE in str(told)
        out, _ = ran(q, q, q, options=NpuOptions(opt_mode="static"))
        close(out, q, q, q)
    ran(q, q, q)
    os.environ[FA_TYPE] = LASER  # after polyattn read it
    try:
        with pytest.raises(RuntimeError, match="reload_environment"):
            ran(q, q, q)
    finally:
        del os.environ[FA_TYPE]


def scene_the_released_package_ran() -> None:
    import importlib.metadata

    import mindiesd

    assert importlib.metadata.version("mindiesd") == "3.1.0"
    assert mindiesd.__file__
    assert not hasattr(mindiesd, "quant_attention")


@pytest.mark.parametrize("scene", scenes_of(globals()))
def test_scene(scene: str) -> None:
    passed(__name__, scene, soc="A2", lint=True)
