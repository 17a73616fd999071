"""fastvideo_kernel as it is installed: its fine branch for each volume of tiles, and what of it really loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from polyattn.vendor import warn

#: (q, k, v [B,H,n*volume,D], block_map bool [B,H,n,n], sizes int32 [n]) -> (out, what stands for an LSE).
Fine = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_FUNCTIONS = {
    64: ("fastvideo_kernel.block_sparse_attn", "block_sparse_attn"),
    128: ("fastvideo_kernel.block_sparse_attn_256", "block_sparse_attn_128"),
    256: ("fastvideo_kernel.block_sparse_attn_256", "block_sparse_attn_256"),
}


@lru_cache(maxsize=len(_FUNCTIONS))
def fine(volume: int) -> Fine:
    """The fine branch for tiles of that volume; ImportError, with the cause, where the package cannot be imported."""
    module, name = _FUNCTIONS[volume]
    try:
        # as an attribute of the package, the module's name is its function
        function: Fine = getattr(import_module(module), name)
    except Exception as error:  # without a device it raises RuntimeError, out of Triton
        raise ImportError(f"fastvideo_kernel cannot be imported: {type(error).__name__}: {error}") from error
    return function


def compiled() -> bool:
    """Whether tiles of 64 go to its compiled kernels, which take one sample at a time; told once where they should."""
    module: Any = import_module("fastvideo_kernel.block_sparse_attn")
    if not module._is_sm90() or module._force_triton():
        return False
    if None in module._get_sm90_ops():
        _tell_once()
        return False
    return True


@lru_cache(maxsize=1)
def _tell_once() -> None:
    try:
        import_module("fastvideo_kernel._C.fastvideo_kernel_ops")
        cause = "it lacks the op"
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
    warn(
        f"cuda:fastvideo: the compiled kernels of fastvideo_kernel do not load ({cause}), so that its Triton kernels "
        "run. Its extension wants NCCL 2.29 or later, and the driver's libcuda.so.1 before it (LD_PRELOAD of both)"
    )
