"""The real package `vllm_xpu_kernels` over the emulated op: its order of arguments, its refusals, its faults."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from polyattn.reference import reference_attention
from tests.emulators.kit import PACKAGES
from tests.emulators.xpu import vllm_fa2
from tests.emulators.xpu.releases import KERNELS, SCHEMAS
from tests.emulators.xpu.stack import LintError, using

pytestmark = pytest.mark.emulated

RELEASE = "0.1.16.2"
HOW = f"pip install --no-deps --target FOLDER vllm-xpu-kernels=={RELEASE}, and {PACKAGES}=FOLDER"


@pytest.fixture(scope="module")
def package():
    """The module with flash_attn_varlen_func, from the folders of PACKAGES alone, so that no other one is seen."""
    kept = list(sys.path)
    sys.path[:0] = [folder for folder in os.environ.get(PACKAGES, "").split(os.pathsep) if folder]
    try:
        vllm_fa2.install()
        module = importlib.import_module("vllm_xpu_kernels.flash_attn_interface")
    except ModuleNotFoundError:
        pytest.skip(f"vllm_xpu_kernels is not here ({HOW})")
    finally:
        sys.path[:] = kept
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_xpu_kernels"]:
        del sys.modules[name]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cu(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def ran(call) -> list[str]:
    """The emulated kernels that a call runs."""
    vllm_fa2.counts.clear()
    call()
    return sorted(vllm_fa2.counts)


def test_the_order_of_arguments_is_vllms(package):
    names = list(inspect.signature(package.flash_attn_varlen_func).parameters)
    assert names[:8] == [
        "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k",
    ]  # fmt: skip
    assert names.index("dropout_p") < names.index("softmax_scale") < names.index("causal")


def test_the_ops_declaration_and_its_kernels_are_those_of_the_wheel(package):
    folder = Path(package.__file__).parent
    extension = folder / "_vllm_fa2_C.abi3.so"
    declared = re.search(rb"varlen_fwd\(Tensor q[^\0]*", extension.read_bytes())
    assert declared is not None
    assert declared.group().decode() == SCHEMAS[RELEASE]
    for family, library in KERNELS[RELEASE].items():
        file = folder / f"libattn_kernels_{family[:2]}_{family[2:]}.so"
        if not file.exists():  # 700 MiB that the Makefile does not keep
            continue
        names = file.read_bytes()
        found = re.findall(rb"chunk_policy_head(\d+)_([ft]{5})\.cpp", names)
        assert {(int(size), flags.decode()) for size, flags in found} == {
            (size, flags) for size, variants in library.prefill.items() for flags in variants
        }
        decode = re.findall(rb"paged_decode_kernel_template_(q\d+_h\d+_p\d+_[ft]{3})\.cpp", names)
        assert {name.decode() for name in decode} == library.decode


def test_documents_go_to_the_native_kernel_and_a_tensor_comes_back(package):
    q, k = drawn(5, 4, 64), drawn(7, 2, 64)
    attend = package.flash_attn_varlen_func
    calls = ran(lambda: close(
        attend(q, k, k, 3, cu(0, 3, 5), 4, cu_seqlens_k=cu(0, 4, 7))[:3],
        reference_attention(q[None, :3].double(), k[None, :4].double(), k[None, :4].double())[0],
    ))  # fmt: skip
    assert calls == ["prefill 64 fffff"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "cu_seqlens_k or seqused_k must be provided"),
        ({"cu_seqlens_k": cu(0, 4), "seqused_k": cu(4)}, "cannot be provided at the same time"),
        ({"cu_seqlens_k": cu(0, 4), "block_table": cu(0)[None]}, "seqused_k is needed"),
        ({"seqused_k": cu(4)}, "cu_seqlens_k is needed"),
    ],
)
def test_neither_both_nor_the_wrong_lengths(package, asked, words):
    q = drawn(4, 2, 64)
    with pytest.raises(AssertionError, match=words):
        package.flash_attn_varlen_func(q, q, q, 4, cu(0, 4), 4, **asked)


def test_what_is_not_compiled_runs_as_its_slow_reference_without_an_error(package, caplog):
    q, k = drawn(4, 2, 192), drawn(6, 2, 192)
    call = lambda: package.flash_attn_varlen_func(q, k, k, 4, cu(0, 4), 6, cu_seqlens_k=cu(0, 6))  # noqa: E731
    assert ran(call) == []
    close(call(), reference_attention(q[None].double(), k[None].double(), k[None].double())[0])
    assert "Performance will be significantly degraded" in caplog.text


@pytest.mark.parametrize("window", [(2, 0), (2, 3)])
def test_no_window_over_packed_documents_is_native(package, window):
    q = drawn(9, 2, 128)
    answers = []
    call = lambda: answers.append(  # noqa: E731
        package.flash_attn_varlen_func(q, q, q, 9, cu(0, 9), 9, cu_seqlens_k=cu(0, 9), window_size=window)
    )
    assert ran(call) == []
    close(answers[0], reference_attention(*(q[None].double() for _ in range(3)), window=window)[0])


def test_its_reference_ignores_a_window_of_no_neighbours(package):
    q = drawn(9, 2, 128)
    out = package.flash_attn_varlen_func(q, q, q, 9, cu(0, 9), 9, cu_seqlens_k=cu(0, 9), window_size=(0, 0))
    close(out, reference_attention(*(q[None].double() for _ in range(3)))[0])


def test_its_reference_leaves_out_rows_of_no_document(package):
    q = drawn(6, 2, 192)
    out = package.flash_attn_varlen_func(q, q, q, 4, cu(0, 4), 6, cu_seqlens_k=cu(0, 6))
    assert out.shape[0] == 4
    with pytest.raises(RuntimeError, match="shape"):
        package.flash_attn_varlen_func(q, q, q, 4, cu(0, 4), 6, cu_seqlens_k=cu(0, 6), out=torch.empty_like(q))


def test_a_few_causal_queries_over_pages_are_decoded_and_see_one_key_at_least(package):
    q, pool = drawn(4, 2, 128), drawn(2, 64, 2, 128)
    asked = {"seqused_k": cu(9, 1), "block_table": torch.tensor([[1], [0]], dtype=torch.int32), "causal": True}
    answers = []
    call = lambda: answers.append(package.flash_attn_varlen_func(q, pool, pool, 2, cu(0, 2, 4), 9, **asked))  # noqa: E731
    assert ran(call) == ["decode q8_h128_p64_fff"]
    keys = pool[1, :9][None].double()
    close(answers[0][:2], reference_attention(q[None, :2].double(), keys, keys, causal=True)[0])
    close(answers[0][2], pool[0, 0])  # a row whose keys all lie to its right: no key, yet it takes the first one


def test_with_an_lse_the_same_queries_are_prefilled(package):
    q, pool = drawn(4, 2, 128), drawn(2, 64, 2, 128)
    asked = {"seqused_k": cu(9, 9), "block_table": torch.tensor([[1], [0]], dtype=torch.int32), "causal": True}
    call = lambda: package.flash_attn_varlen_func(  # noqa: E731
        q, pool, pool, 2, cu(0, 2, 4), 9, return_softmax_lse=True, **asked
    )
    assert ran(call) == ["decode q8_h128_p64_fff", "prefill 128 ttfft"]


def test_softcap_and_alibi_are_ignored_by_the_kernels(package):
    q = drawn(4, 2, 64) * 8
    call = package.flash_attn_varlen_func
    bounds = {"cu_seqlens_k": cu(0, 4)}
    plain = call(q, q, q, 4, cu(0, 4), 4, **bounds)
    for asked in ({"softcap": 1.0}, {"alibi_slopes": torch.ones(2)}):
        assert torch.equal(plain, call(q, q, q, 4, cu(0, 4), 4, **bounds, **asked))
        with using(lint=True), pytest.raises(LintError, match="ignored by the native kernels"):
            call(q, q, q, 4, cu(0, 4), 4, **bounds, **asked)


def test_strided_keys_are_lint(package):
    kv = drawn(4, 2, 2, 64)
    q = drawn(4, 2, 64)
    with using(lint=True), pytest.raises(LintError, match="contiguous"):
        package.flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], 4, cu(0, 4), 4, cu_seqlens_k=cu(0, 4))


def test_there_is_no_shape_function_and_no_gradient(package):
    q, bounds = drawn(4, 2, 64), cu(0, 4)
    with FakeTensorMode() as mode:
        fake, fake_bounds = mode.from_tensor(q), mode.from_tensor(bounds)
        with pytest.raises(UnsupportedOperatorException):
            package.flash_attn_varlen_func(fake, fake, fake, 4, fake_bounds, 4, cu_seqlens_k=fake_bounds)
    q.requires_grad_()
    out = package.flash_attn_varlen_func(q, q, q, 4, bounds, 4, cu_seqlens_k=bounds)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):  # and what comes back is no gradient
        torch.autograd.grad(out.sum(), q, allow_unused=True)
