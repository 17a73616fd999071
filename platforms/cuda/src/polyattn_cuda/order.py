"""Which backend is asked first for a request on a device of NVIDIA's; facts in, names out.

Hopper's order is measured where `benchmarks/results/` has it (`small_h200.json` for small calls); the others' are
expected.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from polyattn.vendor import Machine, Request

#: By architecture; `fastvideo` takes video tiles alone. Quantising backends come last: they take only requests that
#: ask for it.
_HOPPER = (
    "fa3",
    "fa4",
    "cudnn",
    "flash_attn",
    "torch_varlen",
    "triton",
    "fastvideo",
    "sdpa",
    "blocked",
    "flex",
    "sage",
)
_BLACKWELL = ("fa4", "cudnn", "triton", "torch_varlen", "fastvideo", "sdpa", "blocked", "flex", "sage")
_OLDER = ("flash_attn", "torch_varlen", "cudnn", "fa3", "triton", "fastvideo", "sdpa", "blocked", "flex", "sage")

#: Small calls wait for the host: first whom the host has started soonest, in inference and with gradients.
_HOPPER_SMALL = ("triton", *(name for name in _HOPPER if name != "triton"))
_HOPPER_SMALL_TRAINED = ("sdpa", *(name for name in _HOPPER if name != "sdpa"))
#: One row of queries in a graph.
_HOPPER_ROW = ("cudnn", *(name for name in _HOPPER if name != "cudnn"))


class _Small(NamedTuple):
    """Up to which head dim, products of q and k times the head dim, and keys `triton` is done soonest.

    Keys, because it does not split those of one row among programs.
    """

    head_dim: int
    work: int
    keys: int


#: Called one by one; in a graph, where the host does not matter; padded or packed, where it matters most.
_DENSE = (_Small(64, 1 << 32, 4096), _Small(128, 5 << 28, 2048))
_CAPTURED = (_Small(64, 1 << 30, 1024), _Small(128, 1 << 30, 512))
_STRUCTURED = (_Small(128, 1 << 33, 2048),)
_BOUNDS = {"dense": _DENSE, "key_padding": _STRUCTURED, "packed": _STRUCTURED}
#: In a graph, more keys than this of one row of queries are cuDNN's.
_ROW_KEYS = 512
#: Products with gradients up to which torch's own choice is soonest done with forward and backward.
_TRAINED_WORK = 1 << 34


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first."""
    if machine.arch == "sm_90":
        return _hopper(request)
    if machine.arch.startswith("sm_10"):
        return _BLACKWELL
    return _OLDER


def _hopper(request: Request) -> tuple[str, ...]:
    kind, dense = request.structure_kind, request.structure_kind == "dense"
    if request.dtype not in ("bfloat16", "float16") or kind not in _BOUNDS:
        return _HOPPER
    queries, keys = request.q.shape[-3], request.k.shape[-3]
    work = prod(request.q.shape) * keys
    if request.grad:
        plain = request.window is None and not request.softcap and not (request.causal and queries != keys)
        return _HOPPER_SMALL_TRAINED if dense and plain and work <= _TRAINED_WORK else _HOPPER
    if request.capturing and not dense:
        return _HOPPER
    if request.capturing and queries == 1 and keys > _ROW_KEYS:
        return _HOPPER_ROW
    width = max(request.head_dim, request.v.shape[-1])
    bounds = _CAPTURED if request.capturing else _BOUNDS[kind]
    small = next((small for small in bounds if width <= small.head_dim), None)
    return _HOPPER_SMALL if small is not None and work <= small.work and keys <= small.keys else _HOPPER
