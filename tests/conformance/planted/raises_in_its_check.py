"""Divides by what a request may not have."""

from dataclasses import replace

from planted_honest import planted


def backend():
    return replace(planted(__name__), check=too_flat)


def too_flat(request, machine):
    return () if request.softcap == 0.0 or 1 // int(request.softcap - 1.5) else ("too flat",)


def attend(*tensors, **given):
    from planted_steps import attend as honest

    return honest(*tensors, **given)
