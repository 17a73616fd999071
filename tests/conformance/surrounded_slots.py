"""Slots for what is acted out around a call: right ones, and ones whose fault shows only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.backends.generic import blocked_dense, blocked_key_padding, blocked_packed
from polyattn.vendor import Backend, Features, Slot

_CLAIMS: dict[str, Any] = {
    "causal": True, "window": True, "lse": True, "gqa": True, "capture": True, "dtypes": frozenset({"float32"}),
}  # fmt: skip
_KINDS = ("dense", "key_padding", "packed")
_kept: dict[Any, Any] = {}
#: What the device does where the host waits for it: "error" makes it raise.
sync_mode = "default"


def backend(name: str) -> Backend:
    """A backend of the slots `<name>_<structure>` where this module has them, of the right ones elsewhere."""
    _kept.clear()
    calls = {kind: f"{name}_{kind}" if f"{name}_{kind}" in globals() else f"right_{kind}" for kind in _KINDS}
    slots = [Slot(f"{__name__}:{call}", Features(kinds=frozenset({kind}), **_CLAIMS)) for kind, call in calls.items()]
    return Backend(name, tuple(slots))


right_dense, right_key_padding, right_packed = blocked_dense, blocked_key_padding, blocked_packed


def bakes_lengths_packed(q, k, v, out, *, meta, **given):
    """Reads the documents' boundaries at the first call of a structure, and never again."""
    if id(meta) not in _kept:
        _kept[id(meta)] = meta, replace(meta, cu_q=meta.cu_q.clone(), cu_k=meta.cu_k.clone(), fixed=True)
    return right_packed(q, k, v, out, meta=_kept[id(meta)][1], **given)


def bakes_keys_dense(q, k, v, out, **given):
    """Works on a copy of the keys that it made at the first call."""
    keys = _kept.setdefault(f"{tuple(k.shape)} {given['causal']}", k.clone())
    return right_dense(q, keys, v, out, **given)


def writes_its_inputs_dense(q, k, v, out, **given):
    """Scales q where it lies."""
    answer = right_dense(q, k, v, out, **given)
    q.mul_(0.5)
    return answer


def waits_dense(q, k, v, out, **given):
    """Waits for the device, as reading a tensor on the host does."""
    if sync_mode == "error":
        raise RuntimeError("called a synchronizing operation")
    return right_dense(q, k, v, out, **given)
