"""Claims softcap and objects to every request that has one."""

from dataclasses import replace

from planted_honest import planted


def backend():
    return replace(planted(__name__), check=object_to_softcap)


def object_to_softcap(request, machine):
    return ("softcap is for another day",) if request.softcap else ()


def attend(*tensors, **given):
    from planted_steps import attend as honest

    return honest(*tensors, **given)
