"""Takes the scale of a quantised tensor from all of its rows, those that nobody sees among them."""

from planted_quantises import attend as quantising
from planted_quantises import own_scale, planted_format


def backend():
    return planted_format(__name__)


def attend(*tensors, **given):
    return quantising(*tensors, **given, scale_of=of_all_rows)


def of_all_rows(tensor, hidden, method):
    return own_scale(tensor.nan_to_num(0.0, 0.0, 0.0), hidden & False, method)
