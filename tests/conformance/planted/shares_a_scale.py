"""Takes one scale for all samples of a quantised batch, so that one sample's NaN is everybody's."""

import torch
from planted_quantises import attend as quantising
from planted_quantises import own_scale, planted_format


def backend():
    return planted_format(__name__)


def attend(*tensors, **given):
    return quantising(*tensors, **given, scale_of=shared)


def shared(tensor, hidden, method):
    own = own_scale(tensor, hidden, method)
    return own.amax(0, keepdim=True) if own.dim() else torch.clone(own)
