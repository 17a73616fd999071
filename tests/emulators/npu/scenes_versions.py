"""Scenes on the emulated device: gradients of each version, buffers, results without data, records, old releases."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyattn as pa
from tests.emulators.npu import calls, registry

CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _qkv(dtype: torch.dtype = torch.float32, dim: int = 32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, heads, dim, dtype=dtype) for n, heads in ((5, 4), (7, 2), (7, 2))]


def gradients() -> None:
    """Autograd of each version on the device, a bias's and a sink's too."""
    import torch_npu

    bias, sink = torch.randn(2, 4, 5, 7), torch.randn(4)
    leaves = [t.double().requires_grad_() for t in (*_qkv(), bias)]
    want = pa.reference_attention(*leaves[:3], structure=pa.Mask(leaves[3] * 0.3), scale=0.3)
    want.square().sum().backward()
    for name in ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"):
        mine = [t.npu().requires_grad_() for t in (*_qkv(), bias)]
        op = getattr(torch_npu, name)
        out = op(*mine[:3], 4, "BSND", pse=mine[3], scale=0.3)[0]
        out.square().sum().backward()
        assert registry.calls[-1].op == f"npu::{name.replace('attention', 'attention_grad')}"
        for got, leaf in zip(mine, leaves, strict=True):
            torch.testing.assert_close(got.grad.cpu().double(), leaf.grad, atol=1e-4, rtol=1e-4)
        q, k, v = mine[:3]
        logit = sink.npu().requires_grad_()
        op(q, k, v, 4, "BSND", scale=0.3, sink=logit)[0].sum().backward()
        step = 1e-2
        up, down = (op(q, k, v, 4, "BSND", scale=0.3, sink=logit + d)[0].sum() for d in (step, -step))
        torch.testing.assert_close(logit.grad.sum().cpu(), ((up - down) / (2 * step)).detach().cpu(), atol=1e-2, rtol=0)
    ends = torch.tensor([2, 5]), torch.tensor([3, 7])
    q, k, v = (t[0].npu() for t in _qkv())
    lengths = dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))
    packed = torch_npu.npu_fusion_attention_v3(q, k, v, 4, "TND", scale=0.3, **lengths)
    assert (len(packed), [type(t) for t in packed[4:]]) == (6, [type(q)] * 2)
    docs = pa.Packed.from_lengths([2, 3], [3, 4])
    want = pa.reference_attention(*(t[0] for t in _qkv()), structure=docs, scale=0.3)
    torch.testing.assert_close(packed[0].cpu().double(), want, atol=1e-5, rtol=0)
    for wrong, words in ((ends[0].npu(), "must be on the CPU"), (ends[0][None], "must be 1-D")):
        with pytest.raises(RuntimeError, match=words):
            torch_npu.npu_fusion_attention_v3(q, k, v, 4, "TND", **(lengths | {"actual_seq_qlen": wrong}))


def buffers() -> None:
    """The overloads that write into buffers, which keep their identity and their shape."""
    import torch_npu

    q, k, v = (t.npu() for t in _qkv(torch.bfloat16, 64))
    asked = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.3, "input_layout": "BSND"}
    plain = torch_npu.npu_fused_infer_attention_score(q, k, v, softmax_lse_flag=True, **asked)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 5, 1).npu()
    work = torch_npu._npu_fused_infer_attention_score_get_max_workspace(q, k, v, **asked)
    write = torch_npu.npu_fused_infer_attention_score.out
    given = write(q, k, v, softmax_lse_flag=True, workspace=work, attention_out=out, softmax_lse=lse, **asked)
    assert given[0] is out
    assert torch.equal(out.cpu(), plain[0].cpu())
    assert torch.equal(lse.cpu(), plain[1].cpu())
    with pytest.raises(RuntimeError, match="attention_out is"):
        write(q, k, v, workspace=work, attention_out=out.float(), softmax_lse=lse, **asked)
    second = {"num_query_heads": 4, "num_key_value_heads": 2, "softmax_scale": 0.3, "input_layout": "BSND"}
    out.zero_()
    torch_npu.npu_fused_infer_attention_score_v2.out(q, k, v, attention_out=out, softmax_lse=lse, **second)
    assert torch.equal(out.cpu(), plain[0].cpu())


def fakes() -> None:
    """Results without data have the real ones' shapes and dtypes, but where torch_npu itself declares others."""
    import torch_npu

    half = {"num_heads": 4, "num_key_value_heads": 2, "softmax_lse_flag": True}
    packed = {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [3, 7]}
    ends = {"actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [3, 7]}
    fusion, third = torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v3
    infer = torch_npu.npu_fused_infer_attention_score
    calls_made = [
        (fusion, lambda t: t, (4, "BSND"), {}),
        (fusion, lambda t: t.transpose(1, 2), (4, "BNSD"), {}),
        (fusion, lambda t: t.flatten(2), (4, "BSH"), {}),
        (fusion, lambda t: t.flatten(2).transpose(0, 1), (4, "SBH"), {}),
        (fusion, lambda t: t[0], (4, "TND"), packed),
        (third, lambda t: t.transpose(1, 2), (4, "BNSD"), {}),
        (infer, lambda t: t, (), half | {"input_layout": "BSND"}),
        (infer, lambda t: t.flatten(2), (), half | {"input_layout": "BSH"}),
        (infer, lambda t: t.transpose(1, 2).contiguous(), (), half | {"input_layout": "BNSD_BSND"}),
        (infer, lambda t: t[0], (), half | {"input_layout": "TND"} | ends),
        (infer, lambda t: t[0].transpose(0, 1).contiguous(), (), half | {"input_layout": "NTD_TND"} | ends),
    ]
    for op, place, positional, named in calls_made:
        real = op(*(place(t).npu() for t in _qkv(torch.bfloat16, 64)), *positional, **named)
        with FakeTensorMode():
            blank = [torch.empty(t.shape, dtype=t.dtype, device="npu") for t in _qkv(torch.bfloat16, 64)]
            fake = op(*map(place, blank), *positional, **named)
        assert _facts(fake) == _facts(real), (op.packet, positional, named)
    with FakeTensorMode():
        q, k, v = (torch.empty(t.shape, dtype=t.dtype, device="npu") for t in _qkv(torch.bfloat16, 64))
        assert q.device.type == "npu"
        second = torch_npu.npu_fusion_attention_v2(q, k, v[..., :32], 4, "BSND")
        assert tuple(second[0].shape) == tuple(q.shape)  # the values are narrower
        assert tuple(second[1].shape) == (2, 4, 4, 8)  # four heads in the place of five rows
        assert infer(q, k, v, **(half | {"softmax_lse_flag": False, "input_layout": "BSND"}))[1].numel() == 0
        with pytest.raises(RuntimeError, match="should be greater than 0"):
            infer(q, k, v, num_heads=0)
        codes, exponents = torch_npu.npu_dynamic_mx_quant(q, axis=1)
        assert (tuple(codes.shape), tuple(exponents.shape)) == ((2, 5, 4, 32), (2, 1, 4, 64, 2))
        codes, scales = torch_npu.npu_dynamic_block_quant(q[0], dst_type=torch.float8_e4m3fn, row_block_size=128)
        assert (codes.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, (5, 1, 1))


def _facts(results: object) -> list[object]:
    facts = [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in results if isinstance(t, torch.Tensor)]
    return [len(results), *facts]


def records() -> None:
    """A record says which function of the vendor's led to the op, and what it was given beyond the defaults."""
    import mindiesd
    import torch_npu

    q, k, v = (t[:, :5].npu() for t in _qkv(torch.bfloat16))
    with calls.recording() as log:
        mindiesd.attention_forward(q, q, q, opt_mode="manual", layout="BSND", scale=0.5)
        mindiesd.attention_forward_varlen(q[0], q[0], q[0], [0, 2, 5], [0, 2, 5], causal=True)
        torch_npu.npu_fusion_attention(q, k, v, 4, "BSND", scale=0.5)
    assert [call.through for call in log] == ["mindiesd.attention_forward", "mindiesd.attention_forward_varlen", ""]
    first, second, third = (call.said() for call in log)
    assert {call.op for call in log} == {"npu::npu_fusion_attention"}
    assert (first["input_layout"], first["scale"], first["query"]) == ("BSND", 0.5, "bfloat16[2, 5, 4, 32]")
    assert (second["sparse_mode"], second["actual_seq_qlen"]) == (3, [2, 5])
    assert second["atten_mask"] == "bool[2048, 2048]"
    assert set(third) == {"query", "key", "value", "head_num", "input_layout", "scale"}
    assert calls.described(q.cpu().transpose(1, 2)) == "bfloat16[2, 4, 5, 32] strides [640, 32, 128, 1]"
    torch_npu.npu_fusion_attention(q, k, v, 4, "BSND")
    assert len(log) == 3


def an_old_release() -> None:
    """torch_npu 2.6: what came later is not there, and gradients still are."""
    import torch_npu

    for name in ("npu_fusion_attention_v3", "npu_fused_infer_attention_score_v2", "npu_dynamic_mx_quant"):
        assert not hasattr(torch_npu, name)
    q, k, v = (t.npu().requires_grad_() for t in _qkv())
    for op in (torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2):
        op(q, k, v, 4, "BSND", scale=0.3)[0].sum().backward()
        with pytest.raises(RuntimeError, match="sink"):
            op(q, k, v, 4, "BSND", sink=torch.zeros(4).npu())
