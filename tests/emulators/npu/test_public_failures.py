"""The failures that people reported of these ops in public, each reproduced: npu.md, section 5, row by row.

Rows about installing are the detection's tests; laser's overflow and its scaling are a scene and a planted breach.
"""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from tests.emulators.npu.fia import npu_fused_infer_attention_score as fia
from tests.emulators.npu.fusion import npu_fusion_attention as fusion
from tests.emulators.npu.fusion_versions import npu_fusion_attention_v3
from tests.emulators.npu.quant_ops import fused_infer_attention_score_v2, grouped
from tests.emulators.npu.stack import LintError, using

pytestmark = pytest.mark.emulated

CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_a_mask_of_keys_fails_with_561103_and_the_expanded_one_runs() -> None:
    q = drawn(2, 5, 4, 64)
    drop = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    drop[1, ..., 3:] = True
    with pytest.raises(RuntimeError, match="561103"):
        fusion(q, q, q, 4, "BSND", atten_mask=drop)
    out = fusion(q, q, q, 4, "BSND", atten_mask=drop.expand(2, 1, 5, 5), scale=0.125)[0]
    want = pa.reference_attention(q, q, q, structure=pa.Mask(~drop[:, 0, 0]))
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


def test_fused_infer_reads_a_short_mask_up_to_key_512_and_refuses_its_two_axes() -> None:
    q, k = drawn(1, 3, 4, 64), drawn(1, 600, 4, 64)
    asked = {"num_heads": 4, "input_layout": "BSND"}
    late = torch.zeros(1, 1, 1, 600, dtype=torch.bool)
    late[..., 512:] = True
    assert torch.equal(fia(q, k, k, atten_mask=late, **asked)[0], fia(q, k, k, **asked)[0])
    with pytest.raises(RuntimeError, match="561002"):
        fia(q, k, k, atten_mask=late[0, 0], **asked)


def test_fused_infer_wants_a_bias_of_every_head() -> None:
    q, k = drawn(1, 3, 4, 64), drawn(1, 5, 4, 64)
    asked = {"num_heads": 4, "input_layout": "BSND"}
    with pytest.raises(RuntimeError, match="pse_shift"):
        fia(q, k, k, pse_shift=drawn(1, 1, 1, 5), **asked)
    assert fia(q, k, k, pse_shift=drawn(1, 4, 1, 5), **asked)[0].isfinite().all()


def test_on_one_stack_packed_rows_without_a_mask_are_the_mean_of_v() -> None:
    q = drawn(5, 4, 64)
    asked = {"num_heads": 4, "input_layout": "TND", "actual_seq_lengths": [5], "actual_seq_lengths_kv": [5]}
    with using(cann="broken"):
        out = fia(q, q, q, **asked)[0]
    torch.testing.assert_close(out[0].float(), q.float().mean(0), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("cann", "dims"), [("8.5", (64, 128, 192)), ("8.2", (128, 192))])
def test_packed_rows_of_fused_infer_have_few_head_dims(cann: str, dims: tuple[int, ...]) -> None:
    for dim in (64, 96, 128, 192, 256):
        q = drawn(5, 4, dim)
        asked = {"num_heads": 4, "input_layout": "TND", "actual_seq_lengths": [5], "actual_seq_lengths_kv": [5]}
        with using(cann=cann):
            if dim in dims:
                assert fia(q, q, q, **asked)[0].shape == q.shape
            else:
                with pytest.raises(RuntimeError, match=f"queryD {dim}"):
                    fia(q, q, q, **asked)


def test_an_old_cann_has_no_pages_for_packed_rows() -> None:
    q, pool = drawn(5, 4, 128), drawn(2, 128, 512)
    asked = {"num_heads": 4, "input_layout": "TND", "actual_seq_lengths": [5], "actual_seq_lengths_kv": [9]}
    paged = {"block_table": torch.zeros(1, 1, dtype=torch.int32), "block_size": 128}
    assert fia(q, pool, pool, **asked, **paged)[0].shape == q.shape
    with using(cann="8.2"), pytest.raises(RuntimeError, match="block table is not on this CANN"):
        fia(q, pool, pool, **asked, **paged)


def test_minus_infinity_in_a_bias_is_nan() -> None:
    q = drawn(1, 3, 4, 64)
    bias = torch.zeros(1, 4, 3, 3, dtype=torch.bfloat16)
    bias[..., 2] = float("-inf")
    assert fia(q, q, q, pse_shift=bias, num_heads=4, input_layout="BSND")[0].isnan().all()
    assert fusion(q, q, q, 4, "BSND", pse=bias)[0].isnan().all()
    bias[..., 2] = -1e4
    assert fia(q, q, q, pse_shift=bias, num_heads=4, input_layout="BSND")[0].isfinite().all()
    with using(lint=True), pytest.raises(LintError, match="NaN"):
        fia(q, q, q, pse_shift=bias.masked_fill(bias < 0, float("-inf")), num_heads=4, input_layout="BSND")


def test_causal_rows_before_the_keys_are_zero_by_the_compressed_mask() -> None:
    q, k = drawn(1, 6, 4, 64), drawn(1, 4, 4, 64)
    out = fusion(q, k, k, 4, "BSND", atten_mask=CAUSAL, sparse_mode=3, scale=0.125)[0]
    assert out[:, :2].eq(0).all()
    torch.testing.assert_close(out.double(), pa.reference_attention(q, k, k, causal=True), atol=1e-2, rtol=1e-2)
    whole = torch.ones(6, 4, dtype=torch.bool).triu(-1)
    mean = fusion(q, k, k, 4, "BSND", atten_mask=whole, sparse_mode=1)[0][:, 0]
    torch.testing.assert_close(mean.float(), k.float().mean(1), atol=1e-2, rtol=1e-2)
    assert fusion(q, k, k, 4, "BSND", atten_mask=whole, sparse_mode=1, inner_precise=2)[0][:, 0].eq(0).all()


def test_tiles_of_eight_bits_are_gone_from_the_stock_op() -> None:
    codes = drawn(1, 4, 64, 64).to(torch.float8_e4m3fn)
    modes = {"query_quant_mode": 7, "key_quant_mode": 7, "value_quant_mode": 7}
    scale = torch.ones(1, 4, 1, 1)
    asked = {f"dequant_scale_{name}": scale for name in ("query", "key", "value")}
    asked |= {"num_query_heads": 4, "input_layout": "BNSD"}
    with using(soc="A5"):
        with pytest.raises(RuntimeError, match=r"quant modes \(7, 7, 7\)"):
            grouped(codes, codes, codes, **modes, **asked)
        assert fused_infer_attention_score_v2(codes, codes, codes, **modes, **asked)[0].dtype == torch.float16


def test_sdpa_s_op_has_the_same_mask_failures() -> None:
    q = drawn(2, 4, 5, 64)
    with pytest.raises(RuntimeError, match="561103"):
        npu_fusion_attention_v3(q, q, q, 4, "BNSD", atten_mask=torch.zeros(2, 1, 1, 5, dtype=torch.bool))
