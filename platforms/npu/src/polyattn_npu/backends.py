"""The attention backends of Ascend NPU; `order.py` says which is asked first."""

from __future__ import annotations

from polyattn.vendor import Backend, generic_backends
from polyattn_npu import fia, fusion, laser, mindie, quant, sdpa
from polyattn_npu.op_limits import DTYPES

_sdpa, _blocked = generic_backends(DTYPES)

BACKENDS: tuple[Backend, ...] = (
    fusion.backend(),
    mindie.backend(),
    fia.backend(),
    laser.backend(),
    quant.backend(),
    sdpa.backend(_sdpa),
    _blocked,
)
