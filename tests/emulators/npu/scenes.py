"""Scenes on tensors of the emulated device; test_scenes.py runs each group in a process that has it."""

from __future__ import annotations

import math
import re

import pytest
import torch

import polyattn as pa
from tests.emulators.npu import device, registry
from tests.emulators.npu.stack import LintError, using


def _refused(call, kind: type[BaseException], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def _qkv(queries: int = 5, keys: int = 5, heads: int = 4, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, n, heads, 32, dtype=dtype) for n in (queries, keys, keys)]


def native() -> None:
    """The ops through torch_npu: device checks, host numbers, gradients."""
    import torch_npu

    q, k, v = (t.npu().requires_grad_() for t in _qkv())
    assert q.device.type == "npu"
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    op = torch_npu.npu_fusion_attention
    out = op(q, k, v, 4, "BSND", scale=0.1, atten_mask=mask.npu(), sparse_mode=3)[0]
    assert out.device.type == "npu"
    out.sum().backward()
    leaves = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    want = pa.reference_attention(*leaves, causal=True, scale=0.1)
    want.sum().backward()
    torch.testing.assert_close(out.detach().cpu().double(), want.detach(), atol=1e-5, rtol=0)
    for got, leaf in zip((q, k, v), leaves, strict=True):
        torch.testing.assert_close(got.grad.cpu().double(), leaf.grad, atol=1e-5, rtol=0)
    _refused(lambda: op(q, k, v, 4, "BSND", atten_mask=mask, sparse_mode=3), RuntimeError, "same device")
    _refused(lambda: op(q, k, v, 4, "BSND", scale=torch.tensor(0.1)), RuntimeError, "'float' for argument 'scale'")
    ends = torch.tensor([5], dtype=torch.int32).npu()
    packed = {"actual_seq_qlen": ends, "actual_seq_kvlen": [5]}
    _refused(lambda: op(q[0], k[0], v[0], 4, "TND", **packed), RuntimeError, "actual_seq_qlen")
    packed["actual_seq_qlen"] = list(ends)
    _refused(lambda: op(q[0], k[0], v[0], 4, "TND", **packed), RuntimeError, "actual_seq_qlen")
    _refused(lambda: op(*(t.cpu() for t in (q, k, v)), 4, "BSND"), NotImplementedError, "CPU")
    device.host_reads.clear()
    float(q.detach().sum())
    assert device.host_reads == ["aten::_local_scalar_dense"]


def inference() -> None:
    """In inference mode tensors are what they are on any device, and an op that writes an input is still caught."""
    ordinary = torch.zeros(2, 3).npu()
    with torch.inference_mode():
        views = ordinary.detach(), ordinary.view(3, 2), ordinary.reshape(6), ordinary[0], ordinary.float()
        made = ordinary.half(), ordinary + 1, torch.zeros(2, device="npu"), (ordinary + 1).view(3, 2)
        assert not any(tensor.is_inference() for tensor in views)
        assert all(tensor.is_inference() for tensor in made)
        views[1].add_(1)
        assert ordinary._version == views[0]._version == 1
    assert float(ordinary.cpu().sum()) == 6.0
    registry.define("npu_scene", "keeps", "(Tensor x) -> Tensor", lambda x: x + 1)
    registry.define("npu_scene", "writes", "(Tensor x) -> Tensor", lambda x: x.uniform_() + 1)
    kept = torch.full((2, 3), math.nan).npu(), torch.ones(3, 2).half().npu().t(), torch.ones((), device="npu")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for given in (*kept, *(tensor.clone() for tensor in kept)):
                torch.ops.npu_scene.keeps(given)
                _refused(lambda x=given: torch.ops.npu_scene.writes(x), AssertionError, "modified an input")


def written_places() -> None:
    """A number in a place is in every view of it and moves the version; autograd sees it."""
    pool = torch.zeros(2, 3, 4).npu()
    rows, before = pool[1], pool._version
    pool[1, 2] = 7.0
    rows[-1] = 8.0
    assert pool.cpu()[1].tolist() == [[0.0] * 4, [0.0] * 4, [8.0] * 4]
    assert pool._version == rows._version == before + 2
    _refused(lambda: pool.__setitem__(5, 1.0), IndexError, "out of bounds")
    leaf = torch.zeros(3).npu().requires_grad_()
    _refused(lambda: leaf.__setitem__(0, 1.0), RuntimeError, "in-place")
    kept = leaf * 2
    kept[0] = 1.0
    kept.sum().backward()
    assert leaf.grad.cpu().tolist() == [0.0, 2.0, 2.0]


def mindiesd() -> None:
    """The real package: attention_forward in each mode, its varlen, its laser and their faults."""
    import mindiesd
    from mindiesd.utils.exception import ParametersInvalid

    q, k, v = _qkv(dtype=torch.float16)
    want = pa.reference_attention(q, k, v)
    qn, kn, vn = (t.npu() for t in (q, k, v))

    def forward(*tensors, **asked):
        return mindiesd.attention_forward(*tensors, **({"opt_mode": "manual"} | asked))

    def close(got, wanted, atol: float = 2e-3) -> None:
        torch.testing.assert_close(got.cpu().double(), wanted.double(), atol=atol, rtol=0)

    for asked in ({"layout": "BNSD"}, {"layout": "BSND"}, {"layout": "BSH"}, {"opt_mode": "static"}):
        close(forward(qn, kn, vn, **asked), want)
        assert registry.calls[-1].op == "npu::npu_fusion_attention"
    close(forward(qn, kn, vn, op_type="prompt_flash_attn"), want)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    close(forward(qn, kn, vn, attn_mask=keep.npu()), pa.reference_attention(q, k, v, causal=True))
    assert torch.equal(registry.calls[-1].arguments["atten_mask"].cpu(), ~keep)
    _refused(lambda: forward(qn, kn, vn, attn_mask=keep[None, None, :1].npu()), RuntimeError, "561103")
    _refused(lambda: forward(qn, kn, vn, scale=1), ParametersInvalid, "scale must be float")
    _refused(lambda: forward(qn, kn, vn, op_type="x"), ParametersInvalid, "Unsupported FA type")
    varlen = mindiesd.attention_forward_varlen
    docs = pa.Packed.from_lengths([2, 3])
    wanted = pa.reference_attention(q[0], k[0], v[0], structure=docs, causal=True, scale=0.2)
    rows = (qn[0], kn[0], vn[0])
    close(varlen(*rows, [0, 2, 5], [0, 2, 5], softmax_scale=0.2, causal=True), wanted)
    _refused(lambda: varlen(*rows, [0, 3, 5], [0, 2, 5], causal=True), RuntimeError, "3 queries, 2 keys")
    _refused(lambda: varlen(*rows, [0, 5], [0, 5], max_seqlen_q=5), ParametersInvalid, "max_seqlen_q")
    assert not hasattr(mindiesd, "quant_attention")
    _laser(forward, close)


def _laser(forward, close) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2100, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    asked = {"op_type": "ascend_laser_attention", "layout": "BNSD"}
    close(forward(q.npu(), k.npu(), v.npu(), **asked), pa.reference_attention(q, k, v), 1e-2)
    assert registry.calls[-1].op == "mindiesd::la"
    loud = q * 256
    wanted = pa.reference_attention(loud, loud, v, scale=1e-5)
    assert forward(loud.npu(), loud.npu(), v.npu(), scale=1e-5, **asked).cpu().isnan().any()
    halved = ((t / 16).npu() for t in (loud, loud, v))
    close(forward(*halved, scale=1e-5 * 256, **asked) * 16, wanted, 2e-2)
    short = [t[:, :70].npu() for t in (q, k, v)]
    forward(*short, **asked)
    assert registry.calls[-1].op == "npu::npu_fusion_attention"
    blank = torch.zeros(1, 1, 256, 128, dtype=torch.float16).npu()
    with using(soc="A5"):
        _refused(lambda: torch.ops.mindiesd.la(blank, blank, blank, head_num=1), RuntimeError, "not on A5")
    with using(lint=True):
        mask = blank.bool()
        _refused(lambda: torch.ops.mindiesd.la(blank, blank, blank, mask, head_num=1), LintError, "ignores masks")


def diffusers() -> None:
    """diffusers' own NPU code: its backend and its mask's expansion."""
    import torch_npu
    from diffusers.models import attention_dispatch as dispatch

    dispatch.npu_fusion_attention = torch_npu.npu_fusion_attention
    q, k, v = _qkv(dtype=torch.bfloat16)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1, 3:] = False
    got = dispatch._native_npu_attention(q.npu(), k.npu(), v.npu(), attn_mask=keep.npu())
    want = pa.reference_attention(q, k, v, structure=pa.Mask(keep), scale=1 / math.sqrt(32))
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-2, rtol=0)
    assert registry.calls[-1].arguments["atten_mask"].shape == (2, 1, 5, 5)
