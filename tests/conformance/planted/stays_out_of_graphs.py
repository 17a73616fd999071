"""Correct, and says that it cannot run inside a compiled graph: there it raises."""

from dataclasses import replace

import torch
from planted_honest import CLAIMS
from planted_steps import attend as honest

from polyattn.vendor import Backend, Slot


def backend():
    return Backend("stays_out_of_graphs", (Slot(f"{__name__}:attend", replace(CLAIMS, compile=False)),))


def attend(*tensors, **given):
    if not torch.is_grad_enabled():
        raise RuntimeError("ran inside a compiled graph")
    return honest(*tensors, **given)
