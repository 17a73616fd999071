"""What do `pa.attention` and `pa.Attention` add to the backend's own call, and diffusers' dispatch to its own?

python benchmarks/overhead_cpu.py [--write] [--rounds 25]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _measure import added, interleaved, medians, raw, report, target

import polyattn as pa
from polyattn.plan import load_call


def main() -> int:
    """Measure on one core, in eager inference, with a tiny call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    q = torch.randn(1, 4, 2, 64)  # the smaller the call, the sharper the difference
    layer = pa.Attention(2, 64)
    calls: dict[str, Callable[[], Any]] = {
        "slot": _slot(q),
        "attention": lambda: pa.attention(q, q, q),
        "layer": lambda: layer(q, q, q),
        **_diffusers(q),
    }
    with torch.inference_mode():
        samples = interleaved(calls, rounds=asked.rounds, seconds=0.02)
    function, module = added(samples, "attention", "slot"), added(samples, "layer", "slot")
    extra: dict[str, float] = {}
    targets = {
        "attention adds, us": target(function, at_most=5.0),
        "layer adds, us": target(module, at_most=8.0),
    }
    if "diffusers dispatch" in calls:
        theirs = added(samples, "diffusers dispatch", "diffusers native")
        targets["attention / diffusers' addition"] = target(function / theirs, at_most=1 / 3)
        targets["layer / diffusers' addition"] = target(module / theirs, at_most=1 / 2)
        checked = added(samples, "diffusers dispatch, checks on", "diffusers native")
        extra = {"diffusers' addition, us": theirs, "the same with its checks on, us": checked}
    return report(
        "overhead_cpu",
        {"microseconds": medians(samples) | extra, "raw microseconds": raw(samples), "targets": targets},
        write=asked.write,
    )


def _slot(q: torch.Tensor) -> Callable[[], Any]:
    route = pa.explain(q, q, q).chosen
    assert route is not None
    return partial(
        load_call(route.slot.call), q, q, q, None,
        meta=None, causal=False, scale=0.125, window=None, softcap=0.0, need_lse=False, options=(),
    )  # fmt: skip


def _diffusers(q: torch.Tensor) -> dict[str, Callable[[], Any]]:
    try:
        from diffusers.models import attention_dispatch as dispatch
    except ImportError:
        return {}
    registry = dispatch._AttentionBackendRegistry
    native = registry._backends[dispatch.AttentionBackendName.NATIVE]

    def checked() -> Any:
        registry._checks_enabled = True  # as DIFFUSERS_ATTN_CHECKS=1 does; polyattn always checks
        try:
            return dispatch.dispatch_attention_fn(q, q, q)
        finally:
            registry._checks_enabled = False

    return {
        "diffusers native": lambda: native(q, q, q),
        "diffusers dispatch": lambda: dispatch.dispatch_attention_fn(q, q, q),
        "diffusers dispatch, checks on": checked,
    }


if __name__ == "__main__":
    sys.exit(main())
