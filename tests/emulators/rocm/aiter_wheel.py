"""aiter's functions with the signatures of the wheel 0.1.7.post2.dev18, the one that pip finds."""

from __future__ import annotations

from tests.emulators.rocm import aiter_calls, aiter_prefill

NAMES = (
    "flash_attn_func", "flash_attn_varlen_func", "mha_batch_prefill_func", "flash_attn_fp8_pertensor_func",
    "flash_attn_varlen_fp8_pertensor_func",
)  # fmt: skip


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), bias=None,
                    alibi_slopes=None, deterministic=True, return_lse=False, return_attn_probs=False,
                    how_v3_bf16_cvt=1, cu_seqlens_q=None, cu_seqlens_kv=None):  # fmt: skip
    """Dense attention."""
    return aiter_calls.dense(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, bias=bias,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=return_lse,
        return_attn_probs=return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
    )  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0,
                           dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1),
                           bias=None, alibi_slopes=None, deterministic=False, return_lse=False,
                           return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None,
                           cu_seqlens_q_padded=None, cu_seqlens_k_padded=None):  # fmt: skip
    """Packed attention, or paged with a block_table; cu_seqlens_k has the lengths of the keys in both."""
    return aiter_calls.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=min_seqlen_q,
        dropout_p=dropout_p, softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, causal=causal,
        window_size=window_size, bias=bias, alibi_slopes=alibi_slopes, deterministic=deterministic,
        return_lse=return_lse, return_attn_probs=return_attn_probs, block_table=block_table, out=out,
        cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_k_padded=cu_seqlens_k_padded,
    )  # fmt: skip


def mha_batch_prefill_func(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1),
                           alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False,
                           out=None):  # fmt: skip
    """Attention over a pool of single rows, listed for each document."""
    aiter_calls._plain(dropout_p, alibi_slopes, return_attn_probs)
    return aiter_prefill.prefill(
        q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap, causal=causal, window_size=window_size, return_lse=return_lse, out=out,
    )  # fmt: skip


def flash_attn_fp8_pertensor_func(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None):
    """Dense attention of float8 values, which are taken as they are."""
    return aiter_prefill.float8(q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale)


def flash_attn_varlen_fp8_pertensor_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                         min_seqlen_q=0, logits_soft_cap=0.0, causal=False, window_size=(-1, -1),
                                         softmax_scale=None):  # fmt: skip
    """Packed attention of float8 values, which are taken as they are."""
    return aiter_prefill.float8(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=logits_soft_cap,
        bounds=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
