"""aiter's functions with the signatures of its main branch in August 2026."""

from __future__ import annotations

from tests.emulators.cuda.flash2 import check
from tests.emulators.rocm import aiter_calls, aiter_prefill
from tests.emulators.rocm.aiter_wheel import NAMES as NAMES


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None,
                    alibi_slopes=None, deterministic=True, return_lse=False, return_attn_probs=False,
                    how_v3_bf16_cvt=1, cu_seqlens_q=None, cu_seqlens_kv=None, sink_ptr=None, num_splits=0):  # fmt: skip
    """Dense attention."""
    check(sink_ptr is None, "sinks are not emulated")
    return aiter_calls.dense(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, bias=bias,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=return_lse,
        return_attn_probs=return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
    )  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0,
                           dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False,
                           window_size=(-1, -1, 0), bias=None, alibi_slopes=None, deterministic=False,
                           return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None,
                           cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, sink_ptr=None):  # fmt: skip
    """Packed attention, or paged with a block_table; cu_seqlens_k has the lengths of the keys in both."""
    check(sink_ptr is None, "sinks are not emulated")
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
                           out=None, kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None,
                           k_descale=None, v_descale=None, kv_block_descale=None, sink_ptr=None,
                           sink_size=0):  # fmt: skip
    """Attention over a pool of pages, listed for each document."""
    aiter_calls._plain(dropout_p, alibi_slopes, return_attn_probs)
    others = (block_table, seqlen_k, q_descale, k_descale, v_descale, kv_block_descale, sink_ptr)
    check(all(given is None for given in others) and not sink_size, "tables, descales and sinks are not emulated")
    return aiter_prefill.prefill(
        q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap, causal=causal, window_size=window_size, return_lse=return_lse, out=out,
        kv_last_page_lens=kv_last_page_lens,
    )  # fmt: skip


def flash_attn_fp8_pertensor_func(q, k, v, q_descale, k_descale, v_descale, causal=False, window_size=(-1, -1, 0),
                                  softmax_scale=None, sink_ptr=None):  # fmt: skip
    """Dense attention of float8 values times their descales."""
    check(sink_ptr is None, "sinks are not emulated")
    return aiter_prefill.float8(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
        descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip


def flash_attn_varlen_fp8_pertensor_func(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k,
                                         max_seqlen_q, max_seqlen_k, min_seqlen_q=0, logits_soft_cap=0.0, causal=False,
                                         window_size=(-1, -1, 0), softmax_scale=None, sink_ptr=None):  # fmt: skip
    """Packed attention of float8 values times their descales."""
    check(sink_ptr is None, "sinks are not emulated")
    return aiter_prefill.float8(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=logits_soft_cap,
        descales=(q_descale, k_descale, v_descale), bounds=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
