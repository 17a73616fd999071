"""The backend `flex`: torch's flex attention as slots of any platform whose compiler has Triton; imports neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polyattn.door.backend import Backend, Features, Requires, Slot
from polyattn.door.platform import Machine
from polyattn.door.request import Request

_FEATURES = Features(
    causal=True, window=True, softcap=True, lse=True, gqa=True, v_dim=True, backward=True, deterministic=True,
    out=True, capture=True, dtypes=frozenset({"bfloat16", "float16", "float32"}), head_dims=range(16, 257, 8),
)  # fmt: skip

#: Function, kinds, whether a window combines with them.
_SLOTS = (
    ("dense", {"dense"}, True),
    ("prefix_kv", {"prefix_kv"}, True),
    ("key_padding", {"key_padding"}, True),
    ("mask", {"mask"}, True),
    ("packed", {"packed"}, True),
    ("spans", {"spans"}, False),
    ("packed", {"packed", "spans"}, False),
)


def _nothing_more(request: Request, machine: Machine) -> tuple[str, ...]:
    return ()


def flex_backend(
    package: str = "triton",
    hint: str = "PyTorch's own wheels for GPUs bring it",
    check: Callable[[Request, Machine], tuple[str, ...]] = _nothing_more,
) -> Backend:
    """`flex` for one platform, whose Triton is the distribution `package`; `check`: the platform's own reasons.

    A first call of its kind compiles for seconds, so automatic choice takes it late.

    >>> flex_backend("pytorch-triton-rocm").requires[0].package
    'pytorch-triton-rocm'
    """

    def objections(request: Request, machine: Machine) -> tuple[str, ...]:
        return (*_spans_on_the_device(request), *check(request, machine))

    return Backend(
        "flex",
        tuple(
            Slot(f"polyattn.backends.flex_slots:{function}", replace(_FEATURES, kinds=frozenset(kinds), window=window))
            for function, kinds, window in _SLOTS
        ),
        requires=(Requires(package, "", hint),),
        check=objections,
        tolerances={"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5},
    )


def _spans_on_the_device(request: Request) -> tuple[str, ...]:
    if request.structure_facts.spans and not request.structure_facts.host:
        return ("spans of documents need their lengths on the host (Packed.from_lengths)",)
    return ()
