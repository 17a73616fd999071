"""Which backend is asked first for a request on a device of NVIDIA's; facts in, names out.

Hopper's order is measured where `benchmarks/results/` has it (`small_h200.json` for small calls); the others' are
expected.
"""

from __future__ import annotations

from math import prod

from polyattn.vendor import Machine, Request

#: By architecture. Quantising backends come last: they take only requests that ask for it.
_HOPPER = ("fa3", "fa4", "cudnn", "flash_attn", "torch_varlen", "triton", "sdpa", "blocked", "flex", "sage")
_BLACKWELL = ("fa4", "cudnn", "triton", "torch_varlen", "sdpa", "blocked", "flex", "sage")
_OLDER = ("flash_attn", "torch_varlen", "cudnn", "fa3", "triton", "sdpa", "blocked", "flex", "sage")

#: Small calls wait for the host: first whom the host has started soonest, in inference and with gradients.
_HOPPER_SMALL = ("triton", *(name for name in _HOPPER if name != "triton"))
_HOPPER_SMALL_TRAINED = ("sdpa", *(name for name in _HOPPER if name != "sdpa"))
#: Products of q and k, times head dim, up to which a call is small: by the widest head dim, and with gradients.
_SMALL = ((64, 1 << 32), (128, 1 << 30))
_SMALL_TRAINED = 1 << 33
#: `triton` does not split the keys of one row among programs.
_MOST_KEYS = 2048


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first."""
    if machine.arch == "sm_90":
        return _hopper(request)
    if machine.arch.startswith("sm_10"):
        return _BLACKWELL
    return _OLDER


def _hopper(request: Request) -> tuple[str, ...]:
    if request.structure_kind != "dense" or request.dtype not in ("bfloat16", "float16"):
        return _HOPPER
    *_, queries, _, head_dim = request.q.shape
    keys = request.k.shape[-3]
    work = prod(request.q.shape) * keys
    if request.grad:
        plain = request.window is None and not request.softcap and not (request.causal and queries != keys)
        return _HOPPER_SMALL_TRAINED if plain and work <= _SMALL_TRAINED else _HOPPER
    width = max(head_dim, request.v.shape[-1])
    most = next((most for widest, most in _SMALL if width <= widest), 0)
    return _HOPPER_SMALL if keys <= _MOST_KEYS and work <= most else _HOPPER
