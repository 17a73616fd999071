"""What npu_fusion_attention's stand-in refuses, each rule once, and the public failures that it reproduces."""

from __future__ import annotations

import pytest
import torch

from tests.emulators.npu.fusion import npu_fusion_attention
from tests.emulators.npu.stack import LintError, using

pytestmark = pytest.mark.emulated

CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Q = torch.zeros(2, 4, 3, 16)  # BSND
T = torch.zeros(6, 3, 16)  # TND
TND = {"input_layout": "TND", "actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6]}


def drop(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


#: What the message must say, the tensors, what is asked.
DENSE = [
    ("head_num", (Q, Q, Q), {"head_num": 0}),
    ("3-D or 4-D", (Q[0, 0], Q, Q), {}),
    ("keep_prob", (Q, Q, Q), {"keep_prob": 0.0}),
    ("keep_prob", (Q, Q, Q), {"keep_prob": 1.5}),
    ("input_layout is empty", (Q, Q, Q), {"input_layout": ""}),
    ("input_layout", (Q, Q, Q), {"input_layout": "SBND"}),
    ("softmax_layout", (Q, Q, Q), {"softmax_layout": "NTD"}),
    ("softmax_layout", (Q, Q, Q), {"softmax_layout": "TND"}),
    ("sparse_mode 7", (Q, Q, Q), {"sparse_mode": 7}),
    ("161002.*\n.*dtypes differ", (Q, Q.half(), Q), {}),
    ("161002.*\n.*float64", (Q.double(), Q.double(), Q.double()), {}),
    ("unsupported layout", (Q, Q, Q), {"input_layout": "BSH"}),
    ("head_num 2", (Q, Q, Q), {"head_num": 2}),
    ("3 query heads and 2", (Q, Q[:, :, :2], Q[:, :, :2]), {}),
    ("no multiple of head_num", (Q.flatten(2), Q.flatten(2), Q.flatten(2)), {"input_layout": "BSH", "head_num": 5}),
    ("batch sizes", (Q, Q[:1], Q[:1]), {}),
    ("more than the head dim", (Q, Q, Q[:, :2]), {}),
    ("head dims 16, 8", (Q, Q[..., :8], Q[..., :8]), {}),
    ("head dims 8, 8, 16", (Q[..., :8], Q[..., :8], Q), {}),
    ("561103.*\n.*head dim 528 > 512", (torch.zeros(1, 1, 3, 528),) * 3, {}),
    ("257 heads", (torch.zeros(1, 1, 257, 16),) * 3, {"head_num": 257}),
    ("pse is torch.float16", (Q, Q, Q), {"pse": torch.zeros(2, 3, 4, 4).half()}),
    ("pse .* is none of", (Q, Q, Q), {"pse": torch.zeros(4, 4)}),
    ("sink must be float32", (Q, Q, Q), {"sink": torch.zeros(4)}),
]
LONG = torch.zeros(1, 1, 1, 16).expand(1, 2**20 + 1, 3, 16)
DENSE += [
    ("S 1048577 > 1M", (LONG, Q[:1, :1], Q[:1, :1]), {}),
    ("B 2097153 > 2M", (Q[:1, :1].expand(2**21 + 1, 1, 3, 16),) * 3, {}),
    ("T 1048577 > 1M", (LONG[0], T, T), TND),
]
MASKS = [
    ("not bool or uint8", {"atten_mask": drop(4, 4, dtype=torch.float32)}),
    ("not bool or uint8", {"atten_mask": drop(4, 4, dtype=torch.int8)}),
    ("561103.*\n.*not broadcast", {"atten_mask": drop(2, 1, 1, 4)}),
    ("not broadcast", {"atten_mask": drop(2, 4)}),
    ("not broadcast", {"atten_mask": drop(2, 4, 4)}),
    ("not broadcast", {"atten_mask": drop(1, 3, 4, 4)}),
    ("not broadcast", {"atten_mask": drop(4, 4), "sparse_mode": 5, "prefix": [1, 1]}),
    ("2048x2048", {"atten_mask": drop(4, 4), "sparse_mode": 3}),
    ("3072x2048", {"atten_mask": CAUSAL, "sparse_mode": 6, "prefix": [1, 1]}),
    ("other contents", {"atten_mask": drop(3072, 2048), "sparse_mode": 6, "prefix": [1, 1]}),
    ("2048x2048", {"atten_mask": CAUSAL[None, None], "sparse_mode": 3}),
    ("not triu", {"atten_mask": ~CAUSAL, "sparse_mode": 3}),
    ("not triu", {"atten_mask": CAUSAL.triu(2), "sparse_mode": 2}),
    ("prefix", {"atten_mask": drop(2, 1, 4, 4), "sparse_mode": 5}),
    ("prefix 5", {"atten_mask": drop(2, 1, 4, 4), "sparse_mode": 5, "prefix": [5, 1]}),
    ("do not fit", {"atten_mask": CAUSAL, "sparse_mode": 4, "pre_tockens": -1, "next_tockens": -1}),
    ("do not fit", {"atten_mask": drop(4, 4), "pre_tockens": -2, "next_tockens": 1}),
    ("do not fit", {"atten_mask": drop(4, 4), "pre_tockens": 9, "next_tockens": -4}),
]
PACKED = [
    ("equal length", {"actual_seq_qlen": None}),
    ("equal length", {"actual_seq_kvlen": [6]}),
    ("sparse_mode 5", {"sparse_mode": 5}),
    ("Query T 6 need larger than 7", {"actual_seq_qlen": [2, 7]}),
    ("Key T 6 need larger than 7", {"actual_seq_kvlen": [2, 7]}),
    ("3 queries, 2 keys", {"actual_seq_qlen": [3, 6], "atten_mask": CAUSAL, "sparse_mode": 3}),
    ("neither", {"atten_mask": drop(5, 5)}),
    ("next_tokens < 0", {"atten_mask": drop(6, 6), "next_tockens": -1}),
    ("band leaves", {"atten_mask": CAUSAL, "sparse_mode": 4, "pre_tockens": -1}),
    ("cut document", {"atten_mask": CAUSAL, "sparse_mode": 7, "next_tockens": 1}),
]


def call(*tensors: torch.Tensor, head_num: int = 3, input_layout: str = "BSND", **asked):
    return npu_fusion_attention(*tensors, head_num, input_layout, **asked)


@pytest.mark.parametrize(("words", "tensors", "asked"), DENSE)
def test_refuses(words: str, tensors: tuple[torch.Tensor, ...], asked: dict) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(*tensors, **asked)


@pytest.mark.parametrize(("words", "asked"), MASKS)
def test_refuses_the_mask(words: str, asked: dict) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(Q, Q, Q, **asked)


@pytest.mark.parametrize(("words", "asked"), PACKED)
def test_refuses_packed(words: str, asked: dict) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(T, T, T, **(TND | asked))


def test_lower_case_layouts_are_taken_and_tnd_then_loses_its_own_checks() -> None:
    assert call(Q, Q, Q, input_layout="bsnd")[0].shape == Q.shape
    with pytest.raises(RuntimeError, match="not in 0..6"):
        call(T, T, T, **(TND | {"input_layout": "tnd", "sparse_mode": 7, "atten_mask": CAUSAL}))


def test_limits_are_facts_of_the_stack() -> None:
    wide = torch.zeros(1, 1, 3, 528)
    with using(cann="8.5-768"):
        assert call(wide, wide, wide)[0].shape == wide.shape
    with using(cann="8.2"), pytest.raises(RuntimeError, match="does not support sink"):
        call(Q, Q, Q, sink=torch.zeros(3))


def test_lint_names_what_is_undefined() -> None:
    with using(lint=True):
        with pytest.raises(LintError, match="sees nothing"):
            call(T, T, T, **(TND | {"atten_mask": ~drop(6, 6), "sparse_mode": 1}))
        many = TND | {"actual_seq_qlen": [6] * 1025, "actual_seq_kvlen": [6] * 1025}
        with pytest.raises(LintError, match="1025 documents"):
            call(T, T, T, **many)
        with pytest.raises(LintError, match="without keys"):
            call(T, T, T, **(TND | {"actual_seq_kvlen": [0, 6]}))
        with pytest.raises(LintError, match="the mask shows"):
            call(Q, Q, Q, atten_mask=drop(4, 4), pre_tockens=1, next_tockens=0)
    assert call(T, T, T, **(TND | {"actual_seq_kvlen": [0, 6]}))[0].eq(0).all()
