"""Claims the same bits run to run and adds noise below the tolerance."""

import torch
from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, softmax=noisy)


def noisy(q, k, v, seen, bias, scale, softcap, step):
    from planted_steps import softmax

    out, lse = softmax(q, k, v, seen, bias, scale, softcap, step)
    return out * (1 + 1e-6 * torch.rand_like(out)), lse
