"""aiter's batch prefill over lists of pages, and its functions for float8, in both of its builds."""

from __future__ import annotations

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.rocm import aiter_main, aiter_prefill, aiter_wheel
from tests.emulators.rocm.stack import using

MAIN = "main-2026-08"


def drawn(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def exact(q, k, v, **asked):
    return reference_attention(*(t.double() for t in (q, k, v)), **asked)


def prefill(q, pool, *, module, pages, **asked):
    return module.mha_batch_prefill_func(
        q, pool, pool, cu(0, q.shape[0]), cu(0, len(pages)), cu(*pages), q.shape[0], 64, **asked
    )


def test_the_wheels_batch_prefill_reads_single_rows_by_a_list():
    q, pool = drawn(3, 2, 64), drawn(9, 2, 64)
    rows = [7, 1, 4, 0]
    out, lse = prefill(q, pool, module=aiter_wheel, pages=rows, causal=True, return_lse=True)
    want, want_lse = exact(q[None], pool[rows][None], pool[rows][None], causal=True, return_lse=True)
    close(out, want[0])
    close(lse, want_lse[0])
    with pytest.raises(RuntimeError, match="num_blocks, num_heads_k"):
        prefill(q, pool[:8].view(2, 4, 2, 64), module=aiter_wheel, pages=[0])
    with pytest.raises(RuntimeError, match="outside the pool"):
        prefill(q, pool, module=aiter_wheel, pages=[9])
    with pytest.raises(RuntimeError, match="invalid argument for fmha_batch_prefill"):
        prefill(drawn(3, 2, 256), drawn(9, 2, 256), module=aiter_wheel, pages=rows)


def test_the_main_branchs_batch_prefill_reads_pages_and_the_length_of_the_last():
    q, pool = drawn(3, 2, 64), drawn(4, 16, 2, 64)
    with using(aiter=MAIN):
        out = prefill(q, pool, module=aiter_main, pages=[3, 1], kv_last_page_lens=cu(5))
        keys = torch.cat([pool[3], pool[1, :5]])[None]
        close(out, exact(q[None], keys, keys)[0])
        with pytest.raises(RuntimeError, match="pages of 8"):
            prefill(q, pool[:, :8].contiguous(), module=aiter_main, pages=[3], kv_last_page_lens=cu(5))
        with pytest.raises(ValueError, match="vector size"):
            prefill(drawn(3, 2, 20), drawn(4, 16, 2, 20), module=aiter_main, pages=[3], kv_last_page_lens=cu(5))


def test_float8_is_the_chips_own_and_descales_are_the_main_branchs():
    q = drawn(1, 8, 2, 64)
    with using(arch="gfx950"):
        small = (q / 2).to(aiter_prefill.float8_type())
        out = aiter_wheel.flash_attn_fp8_pertensor_func(small, small, small)
        assert out.dtype == torch.bfloat16
        close(out, exact(*[small.float()] * 3))
    with using(arch="gfx950", aiter=MAIN):
        two = torch.tensor([2.0])
        out = aiter_main.flash_attn_fp8_pertensor_func(small, small, small, two, two, two)
        close(out / 2, exact(*[small.float()] * 3, scale=4 * 64**-0.5))
    with using(arch="gfx942"), pytest.raises(RuntimeError, match="data type"):
        aiter_wheel.flash_attn_fp8_pertensor_func(small, small, small)
