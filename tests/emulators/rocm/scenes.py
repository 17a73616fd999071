"""Scenes over flash_attn's real Python package; test_flash_attn_package.py runs each in a process of its own."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.rocm.stack import LintError, using

INF = float("inf")


def _cu(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def _qkv(queries: int = 5, keys: int = 5, dim: int = 64, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, heads, dim).to(dtype) for n, heads in ((queries, 4), (keys, 2), (keys, 2))]


def _close(got: torch.Tensor, want: torch.Tensor, atol: float = 4e-3) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=0)


def _exact(*tensors: torch.Tensor, **asked: Any) -> Any:
    return reference_attention(*(t.double() for t in tensors), **asked)


def _refused(call: Callable[[], Any], kind: type[BaseException], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def extension() -> None:
    """The public functions over Composable Kernel."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    assert torch.version.hip is not None
    assert torch.version.cuda is None
    q, k, v = _qkv(5, 7, 60)
    _close(flash_attn_func(q, k, v, causal=True), _exact(q, k, v, causal=True))
    out, lse, _ = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), _cu(0, 5, 10), _cu(0, 7, 14), 5, 7, causal=True,
        return_attn_probs=True,
    )  # fmt: skip
    _close(out.view(q.shape), _exact(q, k, v, causal=True))
    assert lse.shape == (4, 10)
    assert flash_attn_func(q, k, v, softcap=0.5).equal(flash_attn_func(q, k, v))
    with using(lint=True):
        _refused(lambda: flash_attn_func(q, k, v, softcap=0.5), LintError, "softcap")
    assert flash_attn_with_kvcache(q, k, v).eq(0).all()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    flash_attn_func(*leaves, causal=True).float().sum().backward()
    doubles = [t.double().requires_grad_() for t in (q, k, v)]
    reference_attention(*doubles, causal=True).sum().backward()
    for leaf, right in zip(leaves, doubles, strict=True):
        _close(leaf.grad, right.grad, 2e-2)


def triton_answers() -> None:
    """What the Triton route does well: float32, any head dim, grouped heads, documents, bottom-right causal."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = _qkv(5, 7, 37, dtype)
        _close(flash_attn_func(q, k, v, causal=True), _exact(q, k, v, causal=True), 2e-2)
        _close(flash_attn_func(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), _exact(q, k, v), 2e-2)
    q, k, v = _qkv(6, 6)
    out = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), _cu(0, 2, 11), _cu(0, 2, 11), 9, 9)
    whole = [t.flatten(0, 1) for t in (q, k, v)]
    for rows in (slice(0, 2), slice(2, 11)):
        _close(out[rows], _exact(*(t[None, rows] for t in whole))[0])
    assert out[11].eq(0).all(), "rows of no document are zero: the interface fills the output before it launches"
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    flash_attn_func(*leaves, causal=True).float().sum().backward()
    doubles = [t.double().requires_grad_() for t in (q, k, v)]
    reference_attention(*doubles, causal=True).sum().backward()
    for leaf, right in zip(leaves, doubles, strict=True):
        _close(leaf.grad, right.grad, 2e-2)


def triton_ignores() -> None:
    """What it drops without a word, each the answer to another question."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    q, k, v = _qkv()
    plain = flash_attn_func(q, k, v)
    packed = [*(t.flatten(0, 1) for t in (q, k, v)), _cu(0, 5, 10), _cu(0, 5, 10), 5, 5]
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "window_size_left": (flash_attn_func, {"window_size": (1, 1)}),
        "softcap": (flash_attn_func, {"softcap": 0.5}),
    }
    for words, (call, asked) in calls.items():
        assert call(q, k, v, **asked).equal(plain), words
        _refused(lambda call=call, asked=asked: _linted(call, q, k, v, **asked), LintError, words)
        assert flash_attn_varlen_func(*packed, **asked).equal(flash_attn_varlen_func(*packed)), words
        _refused(lambda asked=asked: _linted(flash_attn_varlen_func, *packed, **asked), LintError, words)
    causal_window = {"causal": True, "window_size": (1, 0)}
    assert flash_attn_func(q, k, v, **causal_window).equal(flash_attn_func(q, k, v, causal=True))
    _linted(flash_attn_func, q, k, v, causal=True, window_size=(-1, 0))
    # a table over a cache: each sample reads the pool at its own place instead
    pool, table = torch.cat([k, k.flip(0)]), torch.tensor([[2], [3]], dtype=torch.int32)
    asked = {"cache_seqlens": _cu(3, 3), "block_table": table}
    wrong = flash_attn_with_kvcache(q, pool, pool, **asked)
    _close(wrong, _exact(q, pool[:2, :3], pool[:2, :3]))
    assert (wrong - _exact(q, pool[2:, :3], pool[2:, :3])).abs().max() > 0.1
    _refused(lambda: _linted(flash_attn_with_kvcache, q, pool, pool, **asked), LintError, "block_table")


def triton_refuses() -> None:
    """A table over packed rows fails for the rank of its pages; no key, no query, or two dtypes are assertions."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = _qkv()
    rows, pool = q.flatten(0, 1), torch.zeros(2, 256, 2, 64, dtype=q.dtype)
    table = torch.zeros(2, 1, dtype=torch.int32)
    paged = (rows, pool, pool, _cu(0, 5, 10), _cu(0, 5, 10), 5, 5)
    _refused(lambda: flash_attn_varlen_func(*paged, block_table=table), ValueError, "unpack")
    _refused(lambda: flash_attn_func(q, k[:, :0], v[:, :0]), AssertionError, "")
    _refused(lambda: flash_attn_func(q[:, :0], k, v), AssertionError, "")
    _refused(lambda: flash_attn_func(q, k, v.float()), AssertionError, "")


def triton_lse() -> None:
    """A packed LSE is [T,H]; a row that sees nothing has 0.0 under causal, and -inf without."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = (t.flatten(0, 1) for t in _qkv(4, 4))
    probs = {"return_attn_probs": True}
    _, lse, _ = flash_attn_varlen_func(q, k, v, _cu(0, 3, 8), _cu(0, 0, 8), 5, 8, **probs)
    assert lse.shape == (8, 4)
    assert lse[:3].eq(-INF).all()
    q, k, v = _qkv(5, 2)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, **probs)
    assert lse.shape == (2, 4, 5)
    assert out[:, :3].eq(0).all()
    assert lse[:, :, :3].eq(0).all()


def triton_lse_overrun() -> None:
    """A causal document that sees nothing at all spoils the LSE behind it, and writes past the end of the tensor."""
    from flash_attn import flash_attn_varlen_func

    q, k, v = (t.flatten(0, 1) for t in _qkv(4, 4))
    asked = {"causal": True, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_func(q, k[:5], v[:5], _cu(0, 0, 3, 8), _cu(0, 0, 0, 5), 5, 5, **asked)
    assert out.isfinite().all()
    assert lse[:5].isnan().any(-1).all(), "both the empty documents' programs and their own write here"
    assert lse[5:].isfinite().all()
    last = (q, k, v, _cu(0, 8, 8), _cu(0, 8, 8), 8, 8)
    flash_attn_varlen_func(*last, **asked)
    _refused(lambda: _linted(flash_attn_varlen_func, *last, **asked), LintError, "past the end of its LSE")


def triton_out_overrun() -> None:
    """Head dims between powers of two: a block that sees nothing under causal spoils the row behind it."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = _qkv(70, 3, 40)
    out = flash_attn_func(q, k, v, causal=True)
    assert out[:, 64, 0, :24].isnan().all()
    assert out.isnan().sum() == 2 * 24
    q, k, v = (t.flatten(0, 1) for t in _qkv(4, 4, 40))
    asked = (_cu(0, 3, 8), _cu(0, 0, 8), 5, 8)
    assert flash_attn_varlen_func(q, k, v, *asked, causal=True)[3, 0, :24].isnan().all()
    assert flash_attn_varlen_func(q, k, v, *asked).isfinite().all()
    wide = (torch.nn.functional.pad(t, (0, 24)) for t in (q, k, v))
    assert flash_attn_varlen_func(*wide, *asked, causal=True).isfinite().all()
    last = (q, k[:3], v[:3], _cu(0, 3, 8), _cu(0, 3, 3), 5, 3)
    flash_attn_varlen_func(*last, causal=True)
    _refused(lambda: _linted(flash_attn_varlen_func, *last, causal=True), LintError, "past the end of its output")


def _linted(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    with using(lint=True):
        return call(*given, **named)


def kernels() -> None:
    """The vendor's real forward kernel in Triton's interpreter gives what its emulator gives, LSE and all."""
    from tests.emulators.rocm import triton_amd

    vendor = _real_forward()
    torch.manual_seed(0)
    q, k, v = (torch.randn(228, heads, 20) for heads in (4, 2, 2))
    spoilt = 0
    for cu_q, cu_k, causal in (
        ((0, 3, 8), (0, 3, 8), False),
        ((0, 3, 8), (0, 5, 9), True),
        ((0, 5, 8), (0, 2, 9), True),
        ((0, 3, 8), (0, 0, 8), False),
        ((0, 3, 8), (0, 0, 8), True),
        ((0, 100, 228), (0, 0, 128), True),
    ):
        longest = [max(b - a for a, b in pairwise(cu)) for cu in (cu_q, cu_k)]
        given = (q[: cu_q[-1]], k[: cu_k[-1]], v[: cu_k[-1]])
        answers = []
        for launch in (vendor, triton_amd.prefill):
            out = torch.zeros_like(given[0])
            rest = (0.25, None, causal, None, "thd", _cu(*cu_q), _cu(*cu_k), *longest, None, None, 0.0, None, None)
            answers.append((out, launch(*given, out, *rest, False, False, None, None, None, None)[0]))
        for real, emulated in zip(*answers, strict=True):
            raced = emulated.isnan()
            torch.testing.assert_close(real[~raced], emulated[~raced], atol=1e-5, rtol=0)
            # the interpreter runs programs one after another, and at some places the stray one is the last
            spoilt += int(real[raced].eq(0).sum())
    assert spoilt > 100


def _real_forward() -> Any:
    """The launcher of the real module, imported beside the package, whose own import wants an extension."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", "gfx942", 64),
        get_benchmarker=lambda: lambda *given, **named: [1.0, 1.0, 1.0],
        get_current_device=lambda: 0, get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    folders = [Path(path) / "flash_attn" for path in sys.path]
    [folder, *_] = [folder for folder in folders if (folder / "flash_attn_triton_amd").is_dir()]
    for name, path in (("flash_attn", folder), ("flash_attn.flash_attn_triton_amd", folder / "flash_attn_triton_amd")):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module
    from flash_attn.flash_attn_triton_amd import fwd_prefill

    return fwd_prefill.attention_prefill_forward_triton_impl
