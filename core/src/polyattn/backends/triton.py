"""The backend `triton`: the portable kernels as slots of any platform with Triton, which this does not import."""

from __future__ import annotations

from polyattn.backends.declarations import TOLERANCES
from polyattn.backends.triton_paged import SLOTS as PAGED_SLOTS
from polyattn.backends.triton_video import SLOTS as VIDEO_SLOTS
from polyattn.door.backend import Backend, Features, Requires, Slot

_SLOTS = "polyattn.backends.triton_flash"
_HINT = "pip install triton (PyTorch's own wheels for GPUs bring it)"


def _features(*kinds: str, window: bool = True) -> Features:
    return Features(
        kinds=frozenset(kinds), causal=True, window=window, softcap=True, lse=True, gqa=True, v_dim=True,
        deterministic=True, out=True, capture=True, dtypes=frozenset({"float16", "bfloat16", "float32"}),
        head_dims=range(1, 513),
    )  # fmt: skip


FLASH_SLOTS: tuple[Slot, ...] = (
    Slot(f"{_SLOTS}:dense", _features("dense"), f"{_SLOTS}:bound_dense"),
    Slot(f"{_SLOTS}:prefix_kv", _features("prefix_kv")),
    Slot(f"{_SLOTS}:key_padding", _features("key_padding")),
    Slot(f"{_SLOTS}:packed", _features("packed")),
    Slot(f"{_SLOTS}:spans", _features("spans", window=False)),
    Slot(f"{_SLOTS}:packed", _features("packed", "spans", window=False)),
)


def triton_backend(package: str = "triton") -> Backend:
    """`triton` for one platform, whose Triton is the distribution `package`.

    >>> [slot.name for slot in triton_backend().slots][:3]
    ['dense', 'prefix_kv', 'key_padding']
    """
    slots = FLASH_SLOTS + PAGED_SLOTS + VIDEO_SLOTS
    return Backend("triton", slots, (Requires(package, "3.4", _HINT),), tolerances=TOLERANCES)
