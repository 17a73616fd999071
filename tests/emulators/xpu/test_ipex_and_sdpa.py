"""What IPEX's functions and torch's SDPA on XPU must reproduce: answers, refusals and reported faults."""

from __future__ import annotations

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.xpu import ipex, sdpa
from tests.emulators.xpu.stack import LintError, using

pytestmark = pytest.mark.emulated

PLAIN = {
    "alibi_slopes": None, "pdropout": 0.0, "zero_tensors": False, "is_causal": False, "return_softmax": False,
    "gen_": None,
}  # fmt: skip


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cu(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=0)


def varlen(q, k, v, cu_q, cu_k, scale=None, **asked):
    known = PLAIN | {"softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale} | asked
    return ipex.varlen_attention(q, k, v, torch.empty_like(q), cu_q, cu_k, max_seqlen_q=8, max_seqlen_k=8, **known)


def test_ipex_attends_documents_apart_and_writes_its_output():
    q, k = drawn(5, 4, 40), drawn(7, 2, 40)
    out = torch.empty_like(q)
    known = PLAIN | {"softmax_scale": 40**-0.5}
    assert ipex.varlen_attention(q, k, k, out, cu(0, 3, 5), cu(0, 4, 7), max_seqlen_q=3, max_seqlen_k=4, **known) is out
    close(out[3:], reference_attention(q[None, 3:], k[None, 4:], k[None, 4:])[0])


def test_ipex_ignores_the_scale():
    q = drawn(4, 2, 64)
    close(varlen(q, q, q, cu(0, 4), cu(0, 4), scale=3.0), varlen(q, q, q, cu(0, 4), cu(0, 4)))
    with using(lint=True), pytest.raises(LintError, match=r"softmax_scale 3.0 is ignored"):
        varlen(q, q, q, cu(0, 4), cu(0, 4), scale=3.0)


def test_ipex_is_causal_from_the_first_row_and_lets_short_documents_see_their_padding():
    q, k = drawn(8, 1, 64), drawn(9, 1, 64)
    out = varlen(q, k, k, cu(0, 5, 8), cu(0, 2, 9), is_causal=True)
    close(out[5:], reference_attention(q[None, 5:], k[None, 2:5], k[None, 2:5], causal=True)[0])
    padded = torch.cat([k[:2], torch.zeros(3, 1, 64)])[None]
    close(out[:5], reference_attention(q[None, :5], padded, padded, causal=True)[0])


def test_ipex_a_document_without_keys_is_zero_and_rows_of_none_are_an_error():
    q, k = drawn(5, 2, 64), drawn(3, 2, 64)
    assert varlen(q, k, k, cu(0, 2, 5), cu(0, 0, 3))[:2].eq(0).all()
    with pytest.raises(RuntimeError, match="shape mismatch"):
        varlen(q, k, k, cu(0, 4), cu(0, 3))


@pytest.mark.parametrize(
    "asked",
    [{"window_size_left": 2}, {"softcap": 5.0}, {"alibi_slopes": torch.ones(2)}, {"zero_tensors": True},
     {"return_softmax": True}],
)  # fmt: skip
def test_ipex_refuses(asked):
    q = drawn(4, 2, 64)
    with pytest.raises(AssertionError):
        varlen(q, q, q, cu(0, 4), cu(0, 4), **asked)


def test_ipex_pages_have_heads_first_are_causal_from_the_bottom_right_and_keep_rows_of_no_document():
    caches = [torch.zeros(3, 2, 16, 64) for _ in range(2)]
    k, v, q = drawn(20, 2, 64), drawn(20, 2, 64), drawn(5, 4, 64)
    ipex.PagedAttention.reshape_and_cache(k, v, *caches, torch.tensor([*range(32, 48), *range(4)]))
    out = torch.full_like(q, 7.0)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    call = ipex.PagedAttention.flash_attn_varlen_func
    call(out, q, *caches, cu(0, 4), cu(0, 20), 4, 20, 0.2, True, table, None)
    close(out[:4], reference_attention(q[None, :4], k[None], v[None], causal=True, scale=0.2)[0])
    assert out[4].eq(7.0).all()
    call(out, q, *caches, cu(0, 4), cu(0, 2), 4, 2, 0.2, True, table, None)
    assert out[:2].isnan().all()
    with pytest.raises(RuntimeError, match="alibi"):
        call(out, q, *caches, cu(0, 4), cu(0, 2), 4, 2, 0.2, True, table, torch.ones(4))
    with pytest.raises(RuntimeError, match="heap corruption"):
        ipex.PagedAttention.reshape_and_cache(k, v, *(torch.zeros(3, 16, 2, 64) for _ in range(2)), torch.arange(20))


def heads_first(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return drawn(*shape, dtype=dtype)


def test_torch_xpu_ops_1432_a_row_that_a_mask_hides_wholly_is_nan():
    q, k = heads_first(1, 2, 3, 64), heads_first(1, 2, 5, 64)
    seen = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    seen[..., 1, :] = False
    for mask in (seen, torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))):
        out = sdpa.attend(q, k, k, mask)
        assert out[0, :, 1].isnan().all()
        assert out[0, :, ::2].isfinite().all()


def test_torch_xpu_ops_5224_too_many_float32_scores_lose_the_device():
    q = torch.zeros(1, 1, 1, 8).expand(1, 2, 2**15, 8)
    with pytest.raises(RuntimeError, match="DEVICE_LOST"):
        sdpa.attend(q, q, q)


def test_torch_xpu_ops_5179_and_pytorch_192158_few_keys_leave_rows_unwritten_at_times():
    q, k = heads_first(1, 2, 32, 64), heads_first(1, 2, 16, 64)
    assert sdpa.attend(q, k, k).isfinite().all()
    with using(unlucky=True):
        assert sdpa.attend(q, k, k).isnan().any()
        assert sdpa.attend(q, q, q).isfinite().all()


def test_sdpa_is_causal_from_the_first_row_and_its_masks_are_of_bool_or_of_qs_dtype():
    q, k = heads_first(1, 2, 3, 64), heads_first(1, 2, 5, 64)
    assert torch.equal(sdpa.attend(q, k, k, is_causal=True)[:, :, 0], k[:, :, 0])
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype"):
        sdpa.attend(q, k, k, torch.zeros(3, 5))
    with pytest.raises(RuntimeError, match="float64"):
        sdpa.attend(q.double(), k.double(), k.double())
    with using(lint=True), pytest.raises(LintError, match="beside a mask"):
        sdpa.attend(q, k, k, torch.zeros(3, 5, dtype=q.dtype), is_causal=True)


@pytest.mark.parametrize(
    ("dtype", "dim", "asked", "kernel"),
    [
        (torch.bfloat16, 64, {}, "flash"),
        (torch.float32, 64, {}, "onednn"),
        (torch.bfloat16, 64, {"mask": True}, "onednn"),
        (torch.bfloat16, 64, {"causal": True, "square": False}, "onednn"),
        (torch.bfloat16, 256, {}, "onednn"),
        (torch.bfloat16, 640, {}, "math"),
        (torch.float32, 64, {"grad": True, "kv_heads": 1}, "math"),
    ],
)
def test_sdpa_takes_the_kernel_that_the_request_allows(dtype, dim, asked, kernel):
    asked = {"mask": False, "causal": False, "square": True, "grad": False, "kv_heads": 2} | asked
    value = heads_first(1, asked.pop("kv_heads"), 3, dim, dtype=dtype)
    assert sdpa.chosen(heads_first(1, 2, 3, dim, dtype=dtype), value, **asked) == kernel
