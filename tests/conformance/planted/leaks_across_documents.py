"""Sees only the first and the last boundary of packed documents."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, documents=one_document)


def one_document(q, k, meta):
    return [((0, int(meta.cu_q[-1])), (0, int(meta.cu_k[-1])))]
