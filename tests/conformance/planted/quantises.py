"""Correct, exactly where nothing else is asked, and in fp8 or int8 where that is; the scales are each sample's own."""

from dataclasses import replace

import torch
from planted_honest import CLAIMS
from planted_steps import attend as honest
from planted_steps import softmax, without_garbage

from polyattn import Quant
from polyattn.vendor import Backend, Slot

FORMATS = replace(CLAIMS, quant=frozenset({"fp8", "int8"}))


def planted_format(module, **claims):
    """The backend whose forward is `attend` in this module, with these formats among its claims."""
    return Backend(module.removeprefix("planted_"), (Slot(f"{module}:attend", replace(FORMATS, **claims)),))


def backend():
    return planted_format(__name__)


def attend(*tensors, scale_of=None, rounded=None, **given):
    """`scale_of` (tensor, hidden, format) and `rounded` (tensor, scale, format) are steps that may be replaced."""
    method = next((option.method for option in given["options"] if isinstance(option, Quant)), None)
    if method is None:
        return honest(*tensors, **given)
    return honest(*tensors, **given, softmax=quantised(method, scale_of or own_scale, rounded or to_format))


def quantised(method, scale_of, rounded):
    def step(q, k, v, seen, bias, scale, softcap, steps):
        group = q.shape[2] // k.shape[2]
        visible = seen.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        unseen = ~visible.any(dim=2).unflatten(1, (-1, group)).any(dim=2).transpose(1, 2)[..., None]
        empty = ~visible.any(-1).transpose(1, 2)[..., None]
        given = ((q, empty), (k, unseen), (v, unseen))
        tensors = [rounded(without_garbage(t, hidden), scale_of(t, hidden, method), method) for t, hidden in given]
        return softmax(*tensors, seen, bias, scale, softcap, steps)

    return step


def own_scale(tensor, hidden, method):
    """[B,1,H,1]: the largest number of the rows that are seen, as the format's largest."""
    most = without_garbage(tensor, hidden).abs().amax((1, 3), keepdim=True) if tensor.numel() else tensor.sum()
    return (most / (448.0 if method == "fp8" else 127.0)).clamp(min=1e-12)


def to_format(tensor, scale, method):
    shrunk = tensor / scale
    return (shrunk.to(torch.float8_e4m3fn).to(tensor.dtype) if method == "fp8" else shrunk.round()) * scale
