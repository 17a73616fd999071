"""The slots of `fusion` over samples [B,S,H,D]: dense, prefixes of keys, masks, biases and spans."""

from __future__ import annotations

from functools import partial

from polyattn.vendor import prefix_into, spans_into
from polyattn_npu import samples
from polyattn_npu.fusion_operator import SIDES, attend

dense = partial(samples.dense, attend, SIDES)
prefix_kv = partial(prefix_into, dense)
spans = partial(spans_into, dense)
mask = partial(samples.mask, attend)
