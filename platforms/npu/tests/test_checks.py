"""What npu:fusion and npu:fia refuse on described machines, and the facts of CANN that they go by; needs no device."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from polyattn.vendor import Accepted, Backend, Machine, Request, StructureFacts, TensorFacts, resolve
from polyattn_npu import cann, cann_limits, fia, fusion, laser, mindie, quant
from polyattn_npu.backends import BACKENDS as NPU
from polyattn_npu.options import NpuOptions
from polyattn_npu.order import order

A2 = Machine("npu", "npu", arch="A2", versions={"torch-npu": "2.13.0"}, build_facts={"cann": "8.5.0"})
BACKENDS = {"fusion": fusion.backend(), "fia": fia.backend()}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def asked(
    kind: str = "dense",
    *,
    samples: int = 2,
    rows: int = 9,
    heads: int = 4,
    dim: int = 64,
    v_dim: int = 64,
    **facts: Any,
) -> Request:
    lead = (rows,) if kind == "packed" else (samples, rows)
    q, k, v = (TensorFacts.contiguous((*lead, heads, size), "float16") for size in (dim, dim, v_dim))
    return Request(q, k, v, device="npu:0", structure_kind=kind, scale=0.125, **facts)


def reasons(backend: Backend, request: Request, machine: Machine = A2) -> str:
    decision = resolve(request, machine, [backend])[0]
    return "" if isinstance(decision, Accepted) else "; ".join(decision.reasons)


@every_backend
def test_a_plain_request_is_accepted_also_where_the_chip_is_not_known(backend: Backend) -> None:
    assert reasons(backend, asked()) == ""
    assert reasons(backend, asked(), replace(A2, arch="")) == ""


@every_backend
def test_a_machine_without_torch_npu_or_of_another_chip_is_told(backend: Backend) -> None:
    assert "pip install torch-npu" in reasons(backend, asked(), replace(A2, versions={}))
    assert "310P" in reasons(backend, asked(), replace(A2, arch="310P"))


@every_backend
@pytest.mark.parametrize("kind", ["packed", "key_padding"])
def test_lengths_that_only_the_device_knows_are_told_with_the_way_out(backend: Backend, kind: str) -> None:
    told = reasons(backend, asked(kind, structure_facts=StructureFacts(host=False, documents=2)))
    assert "only the device knows" in told
    assert "check=True" in told


def test_lse_of_documents_needs_a_torch_npu_and_a_cann_that_order_the_statistics() -> None:
    packed = asked("packed", structure_facts=StructureFacts(documents=3), lse=True)
    assert reasons(BACKENDS["fusion"], packed) == ""
    told = reasons(BACKENDS["fusion"], packed, replace(A2, build_facts={}))
    assert "unknown version" in told
    assert "build_facts['cann']" in told
    spans = replace(packed, structure_facts=StructureFacts(documents=3, spans=True))
    assert reasons(BACKENDS["fusion"], spans, replace(A2, build_facts={})) == "", (
        "a call for each piece: none is packed"
    )
    told = reasons(BACKENDS["fusion"], packed, replace(A2, versions={"torch-npu": "2.6.0"}))
    assert "torch-npu 2.6.0" in told
    assert "CANN 8.2" in reasons(BACKENDS["fusion"], packed, replace(A2, build_facts={"cann": "8.2.RC1"}))
    assert reasons(BACKENDS["fusion"], replace(packed, lse=False), replace(A2, build_facts={"cann": "8.2"})) == ""


def test_sizes_that_the_ops_do_not_take_are_told() -> None:
    few = BACKENDS["fusion"]
    assert "1025 documents" in reasons(few, asked("packed", structure_facts=StructureFacts(documents=1025)))
    assert "1048577 rows" in reasons(few, asked(rows=2**20 + 1))
    assert "value head_dim 128 is larger than the 64" in reasons(few, asked(v_dim=128))
    padded = StructureFacts(documents=2, prefix=True)
    assert reasons(few, asked("key_padding", rows=2**19, structure_facts=padded)) == ""
    assert f"{2**20 + 2} rows" in reasons(few, asked("key_padding", rows=2**19 + 1, structure_facts=padded))
    assert "1025 documents" in reasons(few, asked("key_padding", samples=1025, structure_facts=padded))
    spans = StructureFacts(documents=1025, spans=True)
    assert reasons(few, asked("packed", structure_facts=spans)) == "", "no call is packed"
    assert "head_dim 528" in reasons(BACKENDS["fia"], asked(dim=528, v_dim=528))
    assert reasons(BACKENDS["fia"], asked(heads=255, dim=256, v_dim=256)) == ""
    assert "make rows of more than 65535" in reasons(BACKENDS["fia"], asked(heads=256, dim=256, v_dim=256))


def test_what_cann_says_of_the_packed_call() -> None:
    newest, older = cann_limits.packed_fia("8.5.0"), cann_limits.packed_fia("8.2.RC1")
    assert newest.takes("bfloat16", 64, 4096)
    assert older.takes("bfloat16", 128, 3)
    assert not older.takes("bfloat16", 64, 3)
    assert not newest.takes("float16", 64, 3)
    assert not newest.takes("bfloat16", 64, 4097)
    assert not cann_limits.packed_fia("").takes("bfloat16", 128, 3)


def test_a_version_is_read_as_cann_writes_it() -> None:
    assert cann_limits.at_least("8.3.RC1", 8, 3)
    assert not cann_limits.at_least("8.2.RC1.alpha002", 8, 3)
    assert not cann_limits.at_least("", 1, 0)
    assert cann_limits.named("8.5.0") == "CANN 8.5.0"


def test_a_check_asks_a_loaded_torch_npu_alone_and_of_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = ModuleType("torch_npu.npu.utils")
    monkeypatch.setattr(utils, "get_cann_version", lambda: "8.3.RC1", raising=False)
    monkeypatch.setattr(cann, "_told", lambda: utils.get_cann_version())
    monkeypatch.setattr(
        cann_limits, "has_installed", lambda machine, name: machine.versions.get("torch-npu") == "2.13.0"
    )
    here = replace(A2, build_facts={})
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert cann_limits.version_of(here) == "", "torch-npu is not imported to find out"
    monkeypatch.setitem(sys.modules, "torch_npu", utils)
    assert cann_limits.version_of(here) == "8.3.RC1"
    assert cann_limits.version_of(replace(here, versions={"torch-npu": "2.9.0"})) == "", "not this one"
    assert cann_limits.version_of(A2) == "8.5.0", "what a machine states counts"


@pytest.mark.parametrize("module", [fusion, fia, mindie, laser, quant])
def test_a_chip_that_is_not_known_here_is_refused_by_all_alike(module: ModuleType) -> None:
    installed = {"torch-npu": "2.13.0", "mindiesd": "3.1.0", "einops": "0.8", "safetensors": "0.5"}
    unknown = replace(A2, arch="soc999", versions=installed)
    told = reasons(module.backend(), asked(quant="fp8" if module is quant else None, dim=128, v_dim=128), unknown)
    assert "and this is soc999" in told


def test_sdpa_is_refused_what_the_op_below_it_refuses_and_not_what_torch_s_math_runs() -> None:
    sdpa = next(backend for backend in NPU if backend.name == "sdpa")
    unknown = StructureFacts(host=False, queries="all")
    assert "hands a boolean mask [2, 1, 1, 9]" in reasons(sdpa, asked("key_padding", structure_facts=unknown))
    assert reasons(sdpa, asked("key_padding", structure_facts=unknown, causal=True)) == "", "a row for each query"
    for shape, whole in (((1, 1, 1, 9), False), ((1, 4, 9, 9), False), ((1, 1, 9, 9), True), ((2, 4, 9, 9), True)):
        facts = StructureFacts(mask_shape=shape, mask_dtype="bool")
        assert (reasons(sdpa, asked("mask", structure_facts=facts)) == "") is whole, shape
    assert "value head_dim 80 is larger" in reasons(sdpa, asked(v_dim=80))
    assert "257 query heads" in reasons(sdpa, asked(heads=257))
    kinds = frozenset().union(*(slot.features.kinds for slot in sdpa.slots))
    assert not kinds & {"block_map", "video_tiles"}, "gathered blocks run under masks that the op does not take"
    additive = StructureFacts(mask_shape=(1, 2, 1, 9), mask_dtype="float16")
    assert reasons(sdpa, asked("bias", v_dim=80, structure_facts=additive)) == ""
    assert reasons(sdpa, asked(dim=520, v_dim=528)) == ""
    assert reasons(sdpa, asked(v_dim=80), replace(A2, arch="310P")) == ""
    assert reasons(sdpa, asked("packed", rows=2**21, structure_facts=StructureFacts(documents=2000))) == "", "a loop"


@pytest.mark.parametrize(
    ("mask", "dtype", "taken"),
    [
        ("float16", "float16", True), ("float32", "float16", False), ("bfloat16", "float16", False),
        ("float32", "bfloat16", False), ("float16", "bfloat16", False), ("float16", "float32", True),
        ("float64", "float32", False),
    ],
)  # fmt: skip
def test_sdpa_is_refused_a_bias_that_q_s_dtype_does_not_hold(mask: str, dtype: str, taken: bool) -> None:
    sdpa = next(backend for backend in NPU if backend.name == "sdpa")
    additive = StructureFacts(mask_shape=(1, 1, 1, 9), mask_dtype=mask)
    request = asked("bias", structure_facts=additive)
    told = reasons(sdpa, replace(request, **{name: replace(getattr(request, name), dtype=dtype) for name in "qkv"}))
    assert (told == "") is taken, told
    assert taken or ("npu:blocked" in told and mask in told)


def test_causal_over_lengths_is_refused_in_its_own_words() -> None:
    padded = asked("key_padding", causal=True, structure_facts=StructureFacts(prefix=True, queries="all"))
    assert "aligned at each row's last kept key" in reasons(BACKENDS["fia"], padded)
    assert "packing the kept keys" in reasons(BACKENDS["fusion"], padded)


def test_the_vendor_s_ops_go_before_torch_s_and_what_changes_numbers_last() -> None:
    names = order(asked(), A2)
    assert sorted(names) == sorted(backend.name for backend in NPU)
    assert names.index("fusion") < names.index("mindie") < names.index("sdpa") < names.index("blocked")
    assert names.index("fia") < names.index("sdpa")
    assert names.index("fusion") < names.index("fia"), "fusion has gradients, and packs under no mask"
    assert names[-2:] == ("quant", "laser")
    assert order(asked(options=(NpuOptions(laser_max_abs=8.0),)), A2)[1:] == names[:-1]


def test_laser_goes_first_only_where_it_is_asked_for() -> None:
    assert order(asked(), A2)[0] == "fusion"
    assert order(asked(), A2)[-1] == "laser"
    assert order(asked(options=(NpuOptions(laser_max_abs=8.0),)), A2)[0] == "laser"
    by_variable = replace(A2, env={"MINDIE_SD_FA_TYPE": "ascend_laser_attention"})
    assert order(asked(), by_variable)[0] == "laser"


def test_options_that_a_backend_does_not_read_are_one_reason() -> None:
    stated = NpuOptions(op_type="fused_attn_score", op_layout="BSND"), NpuOptions(op_layout="BNSD")
    told = reasons(BACKENDS["fusion"], asked(options=stated))
    assert told == "it does not read NpuOptions.op_type, NpuOptions.op_layout"
