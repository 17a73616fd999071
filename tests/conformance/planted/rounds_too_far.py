"""Claims fp8 and keeps one bit of the mantissa."""

import torch
from planted_quantises import attend as quantising
from planted_quantises import planted_format


def backend():
    return planted_format(__name__)


def attend(*tensors, **given):
    return quantising(*tensors, **given, rounded=coarsely)


def coarsely(tensor, scale, method):
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 4).round() / 4, exponent)
