"""Which of the makers' packages an emulated process has: flash-attn's own variable decides between its two kernels."""

from __future__ import annotations

import os

from tests.emulators.rocm.flash_attn_2_cuda import TRITON_ROUTE

PACKAGES = ("flash_attn_triton",) if os.environ.get(TRITON_ROUTE) == "TRUE" else ("aiter", "flash_attn", "torch_varlen")
