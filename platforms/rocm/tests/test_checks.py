"""What each of ROCm's own backends takes and refuses on described machines; no kernel runs."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from polyattn.door import loading
from polyattn.vendor import Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve
from polyattn_rocm import aiter, backends, ck, flash_attn, flash_attn_triton, torch_varlen
from polyattn_rocm.order import order

VERSIONS = {"amd-aiter": "0.1.7.post2.dev18", "flash-attn": "2.8.3.post2", "torch": "2.13.0+rocm7.2", "triton": "3.6.0"}
TRITON_ROUTE = {flash_attn.TRITON_ROUTE: "TRUE"}


@pytest.fixture(autouse=True)
def _as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "BROKEN", "")
    monkeypatch.setattr(aiter, "BROKEN", "")


def machine(arch: str = "gfx942", name: str = "AMD Instinct MI300X", env: Any = None, **versions: str) -> Machine:
    return Machine("rocm", "cuda", arch=arch, name=name, versions=VERSIONS | versions, env=env or {})


def request(
    kind: str = "dense", *, queries: int = 8, keys: int = 8, heads: int = 2, dim: int = 64, dtype: str = "bfloat16",
    facts: Any = None, **asked: Any,
) -> Request:  # fmt: skip
    front = (1,) if kind not in ("packed",) else ()
    q = TensorFacts.contiguous((*front, queries, 2, dim), dtype)
    k = TensorFacts.contiguous((*front, keys, heads, dim), dtype)
    given = {"documents": 2} if kind == "packed" else {}
    return Request(
        q, k, k, device="cuda:0", structure_kind=kind, structure_facts=StructureFacts(**given | (facts or {})),
        **{"scale": dim**-0.5, **asked},
    )  # fmt: skip


def reasons(module: Any, asked: Request, on: Machine | None = None) -> str:
    """Why not; empty where it is taken."""
    answer = resolve(asked, on or machine(), [module.backend()])[0]
    return "; ".join(answer.reasons) if isinstance(answer, Rejected) else ""


TAKEN = {
    "aiter": (aiter, [
        request(lse=True, causal=True, queries=3), request("packed", window=(4, 4)), request(grad=True, causal=True),
        request(softcap=30.0, dtype="float16", dim=128), request(softcap=30.0), request(dim=128, window=(4, 0)),
        request("packed", grad=True, causal=True), request(grad=True, causal=True, queries=3, deterministic=True),
        request(heads=1), request("key_padding", facts={"queries": "all", "prefix": True}),
    ]),
    "flash_attn": (flash_attn, [
        request(lse=True, causal=True, queries=3), request("packed", window=(0, 0), dim=128), request(grad=True),
        request("packed", grad=True, deterministic=True, facts={"host": False}), request(dtype="float16", dim=256),
    ]),
    "torch_varlen": (torch_varlen, [
        request(lse=True), request("packed", facts={"host": False}), request("packed", causal=True),
        request(causal=True, queries=9), request(causal=True, grad=True),
        request("key_padding", facts={"queries": "same", "prefix": True}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    module, asked = TAKEN[name]
    assert [reasons(module, one) for one in asked] == [""] * len(asked)


@pytest.mark.parametrize(("asked", "words"), [
    (request("paged", facts={"page_size": 128, "query_layout": "batched"}), "structure 'paged' is not supported"),
    (request(dim=128, softcap=30.0), "does not read it"),
    (request(dim=128, window=(0, 4)), "refuses a left side of 0"),
    (request(softcap=30.0, dtype="float16", grad=True), "not supported together with"),
    (request(causal=True, queries=3, grad=True), "aligned top-left: deterministic=True"),
    (request("packed", causal=True, grad=True, facts={"same_lengths": False}), "aligned top-left"),
    (request(window=(0, 0), grad=True), "does not read it: deterministic=True"),
    (request(dtype="float32"), "dtype float32 not in (bfloat16, float16)"),
    (request(dim=20), "head_dim 20 not in"),
    (request(quant="fp8"), "quant 'fp8'"),
    (request("key_padding", causal=True, facts={"queries": "all"}), "would move the positions"),
])  # fmt: skip
def test_aiter_refuses(asked: Request, words: str) -> None:
    assert words in reasons(aiter, asked)


@pytest.mark.parametrize(("on", "words"), [
    (machine("gfx1100"), "architecture gfx1100 is not among those it has kernels for (gfx942, gfx950)"),
    (machine("gfx90a"), "architecture gfx90a"),
    (machine(**{"amd-aiter": "0.1.5"}), "older than 0.1.7"),
    (Machine("rocm", "cuda", arch="gfx942"), "package amd-aiter is not installed: AITER's own instructions"),
])  # fmt: skip
def test_aiter_refuses_machines(on: Machine, words: str) -> None:
    assert words in reasons(aiter, request(), on)


def test_aiters_assembly_is_not_loaded_on_every_gfx942() -> None:
    apu = machine(name="AMD Instinct MI300A")
    assert "is not loaded on AMD Instinct MI300A" in reasons(aiter, request(dim=128), apu)
    assert reasons(aiter, request(dim=128, dtype="float16"), apu) == ""


def test_another_distribution_in_aiters_place_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aiter.shadowed() == ""
    monkeypatch.setattr(aiter, "version", lambda name: "0.13.20191203")
    monkeypatch.setattr(aiter, "BROKEN", aiter.shadowed())
    assert reasons(aiter, request()) == "", "of this process, not of a machine that is described"
    monkeypatch.setattr(aiter, "is_here", lambda *_: True)
    assert "pip uninstall aiter" in reasons(aiter, request())


def paged(size: int, **facts: Any) -> Request:
    pool = TensorFacts.contiguous((4, size, 2, 64), "bfloat16")
    q = TensorFacts.contiguous((1, 8, 2, 64), "bfloat16")
    known = {"page_size": size, "query_layout": "batched", **facts}
    return Request(
        q, pool, pool, device="cuda:0", structure_kind="paged", scale=0.125, structure_facts=StructureFacts(**known)
    )


@pytest.mark.parametrize(("asked", "words"), [
    (paged(64), "page_size 64 not in (128 to"),
    (paged(128, host=False), "block table on the device"),
    (paged(128, query_layout="padded"), "padded queries"),
    (request(softcap=30.0), "softcap is not supported"),
    (request(lse=True, grad=True), "not supported together"),
])  # fmt: skip
def test_flash_attn_refuses(asked: Request, words: str) -> None:
    assert words in reasons(flash_attn, asked)


@pytest.mark.parametrize("size", [128, 256, 384])
def test_flash_attn_takes_pages_of_128_rows(size: int) -> None:
    assert reasons(flash_attn, paged(size)) == ""
    assert size in ck.PAGE_SIZES


def test_which_of_its_two_routes_the_package_takes_is_a_fact_of_the_machine() -> None:
    routed = machine(env=TRITON_ROUTE)
    assert "ask for flash_attn_triton" in reasons(flash_attn, request(), routed)
    assert reasons(flash_attn_triton, request(), routed) == ""
    assert f"{flash_attn.TRITON_ROUTE} is not set" in reasons(flash_attn_triton, request())
    lower = machine(env={flash_attn.TRITON_ROUTE: "true"})  # the package compares with exactly "TRUE"
    assert "is 'true'" in reasons(flash_attn_triton, request(), lower)
    assert reasons(flash_attn, request(), lower) == ""


def test_a_package_without_its_extension_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "version", lambda name: "2.8.3")
    monkeypatch.setattr(flash_attn.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_attn, "BROKEN", flash_attn.missing_extension())
    assert reasons(flash_attn, request()) == "", "of this process, not of a machine that is described"
    monkeypatch.setattr(flash_attn, "is_here", lambda *_: True)
    assert "without its extension flash_attn_2_cuda" in reasons(flash_attn, request())
    assert reasons(flash_attn_triton, request(), machine(env=TRITON_ROUTE)) == "", "it needs none"


@pytest.mark.parametrize("loaded_with", ["TRUE", None])
def test_the_route_that_the_package_took_at_its_import_counts_not_what_the_variable_became(
    monkeypatch: pytest.MonkeyPatch, loaded_with: str | None
) -> None:
    loaded = types.ModuleType(flash_attn.INTERFACE)
    loaded.USE_TRITON_ROCM = loaded_with == "TRUE"  # type: ignore[attr-defined]
    loaded.flash_attn_func = loaded.flash_attn_varlen_func = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, flash_attn.INTERFACE, loaded)
    here = {"torch": torch.__version__}  # a machine of another torch is described, and not this process
    routed, unset = machine(env=TRITON_ROUTE, **here), machine(**here)
    taken, refused = (flash_attn_triton, routed), (flash_attn, unset)
    if loaded_with is None:
        taken, refused = refused, taken
    _forget()
    try:
        assert reasons(taken[0], request(), taken[1]) == ""
        told = reasons(refused[0], request(), refused[1])
        assert "was when it was imported" in told
        assert f"set it to {'TRUE' if loaded_with is None else 'FALSE'} before the process starts" in told
        with pytest.raises(RuntimeError, match="not those asked for"):  # and no slot calls it
            flash_attn.functions(loaded_with is None)
    finally:
        _forget()


def _forget() -> None:
    loading.forget()
    flash_attn.functions.cache_clear()


@pytest.mark.parametrize(("asked", "words"), [
    (request(window=(4, 4)), "window is not supported"),
    (request(softcap=30.0), "softcap is not supported"),
    (paged(128), "structure 'paged' is not supported"),
    (request("packed", causal=True, facts={"host": False}), "unknown or different lengths"),
    (request("packed", causal=True, facts={"same_lengths": False}), "zeros into other documents' LSE"),
    (request("packed", causal=True, facts={"capacity": True}), "Packed.from_lengths"),
    (request("key_padding", causal=True, facts={"queries": "same", "prefix": True}), "unknown or different lengths"),
    (request(grad=True, deterministic=True), "not supported together"),
    (request(dtype="float32"), "dtype float32"),
])  # fmt: skip
def test_what_the_triton_route_ignores_is_refused(asked: Request, words: str) -> None:
    assert words in reasons(flash_attn_triton, asked, machine(env=TRITON_ROUTE))


def test_the_triton_route_of_a_release_that_was_not_read_is_refused() -> None:
    newer = machine(env=TRITON_ROUTE, **{"flash-attn": "2.9.0"})
    assert "known of 2.8.x alone" in reasons(flash_attn_triton, request(), newer)


@pytest.mark.parametrize("release", ["2.8", "2.8+rocm7", "2.8.0.post1", "2.8.3.post2+rocm7"])
def test_every_release_of_the_line_that_was_read_is_known(release: str) -> None:
    assert reasons(flash_attn_triton, request(), machine(env=TRITON_ROUTE, **{"flash-attn": release})) == ""


@pytest.mark.parametrize("release", ["2.80", "2.9.0", "2.8rc1", "3"])
def test_what_only_looks_like_that_line_is_not(release: str) -> None:
    other = machine(env=TRITON_ROUTE, **{"flash-attn": release})
    assert "is known of 2.8.x alone" in reasons(flash_attn_triton, request(), other)


@pytest.mark.parametrize(("asked", "words"), [
    (request(window=(4, 4)), "window is not supported"),
    (request(softcap=30.0), "softcap is not supported"),
    (paged(256), "structure 'paged' is not supported"),
    (request(causal=True, queries=3), "causal with 3 queries of 8 keys: torch's kernels align causal at the top left"),
    (request("packed", causal=True, facts={"same_lengths": False}), "align causal"),
    (request("packed", causal=True, facts={"host": False}), "unknown or different lengths"),
])  # fmt: skip
def test_torch_varlen_refuses(asked: Request, words: str) -> None:
    assert words in reasons(torch_varlen, asked)


def test_torch_varlen_needs_a_release_that_takes_no_window_for_none() -> None:
    assert "older than 2.11" in reasons(torch_varlen, request(), machine(torch="2.10.0+rocm7.0"))


def test_torch_varlen_on_devices_that_torch_only_tries() -> None:
    assert f"{torch_varlen.EXPERIMENTS}=1" in reasons(torch_varlen, request(), machine("gfx1100"))
    assert reasons(torch_varlen, request(), machine("gfx1100", env={torch_varlen.EXPERIMENTS: "1"})) == ""


@pytest.mark.parametrize("arch", ["", "gfx90a", "gfx942", "gfx950", "gfx1100"])
def test_every_backend_has_its_place_in_the_order(arch: str) -> None:
    names = [backend.name for backend in backends.BACKENDS]
    assert sorted(order(request(), machine(arch))) == sorted(names)


def test_amds_own_kernels_are_asked_first_on_data_centre_devices_alone() -> None:
    firsts = {arch: order(request(), machine(arch))[0] for arch in ("gfx90a", "gfx942", "gfx1100", "gfx1201", "")}
    others = dict.fromkeys(("gfx1100", "gfx1201", ""), "flash_attn_triton")
    assert firsts == {"gfx90a": "aiter", "gfx942": "aiter", **others}


def test_documents_are_kept_apart_natively_by_all_of_them() -> None:
    for name in ("aiter", "flash_attn", "torch_varlen"):
        module = TAKEN[name][0]
        many = request("packed", facts={"documents": 7})
        assert isinstance(resolve(many, machine(), [module.backend()])[0], Accepted)
