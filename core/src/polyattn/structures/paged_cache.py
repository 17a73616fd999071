"""PagedKVCache: the pool of pages that `Paged` attends to, and writing rows into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.structures.host_data import integer, integer_row, integer_tensor, on_host
from polyattn.structures.lasting import lasting, normal


class PagedKVCache:
    """A pool of pages: `k` [pages, page_size, Hk, D] and `v` [pages, page_size, Hk, Dv], contiguous, zero at first.

    >>> import torch, polyattn as pa
    >>> cache = pa.PagedKVCache(4, 2, 1, 8, torch.float32, "cpu")
    >>> cache.write(torch.ones(3, 1, 8), torch.ones(3, 1, 8), torch.tensor([2, 3, -1]))
    >>> cache.k[1].sum().item()
    16.0
    """

    k: torch.Tensor
    v: torch.Tensor

    @lasting
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        v_head_dim: int | None = None,
    ) -> None:
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        sizes["v_head_dim"] = head_dim if v_head_dim is None else v_head_dim
        pages, rows, heads, k_dim, v_dim = (integer(name, size, least=1) for name, size in sizes.items())
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: a torch.dtype is needed, got {dtype!r}")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype: a floating dtype is needed, got {dtype}")
        # one row more than the pages hold: where skipped tokens go, so that no slot is ever read back to leave them out
        k_rows, v_rows = (
            torch.zeros(pages * rows + 1, heads, dim, dtype=dtype, device=device) for dim in (k_dim, v_dim)
        )
        self.__setstate__((k_rows, v_rows, rows))

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._k_rows, self._v_rows, self.page_size

    @lasting
    def __setstate__(self, state: tuple[torch.Tensor, torch.Tensor, int]) -> None:
        k_rows, v_rows, page_size = state
        self._k_rows, self._v_rows = normal(k_rows), normal(v_rows)
        self.k, self.v = (
            rows.narrow(0, 0, rows.shape[0] - 1).unflatten(0, (-1, page_size)) for rows in (self._k_rows, self._v_rows)
        )

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.k.shape[0]

    @torch.no_grad()
    def write(self, k: torch.Tensor, v: torch.Tensor, slots: Any) -> None:
        """Write rows k [T,Hk,D], v [T,Hk,Dv] at `slots` [T] (page*page_size + offset; negative = skip), in place.

        Only the rows given are written. Slots on the host are checked; slots on a device are never read back, and
        those past the pool are skipped. A slot named twice keeps either row. Gradients do not flow into the pool.
        """
        rows = self.num_pages * self.page_size
        for name, given, pool in (("k", k, self._k_rows), ("v", v, self._v_rows)):
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"{name}: a tensor is needed, got {type(given).__name__}")
            if (
                given.dim() != 3
                or given.shape[1:] != pool.shape[1:]
                or given.dtype != pool.dtype
                or given.device != pool.device
            ):
                raise ValueError(
                    f"{name}: rows [T, {pool.shape[1]}, {pool.shape[2]}] {pool.dtype} on {pool.device} are needed, "
                    f"got {list(given.shape)} {given.dtype} on {given.device}"
                )
            if type(given) is torch.Tensor and _same_memory(given, pool):
                raise ValueError(f"{name}: rows of the pool itself are overwritten while they are read; give a copy")
        where = _checked_slots(slots, rows, self.page_size)
        if not k.shape[0] == v.shape[0] == where.shape[0]:
            raise ValueError(
                f"slots: one per row is needed, got {where.shape[0]} for {k.shape[0]} rows of k and {v.shape[0]} of v"
            )
        writer = None if torch.compiler.is_compiling() else _writer_of(k.device.type)
        if writer is not None and all(type(tensor) is torch.Tensor for tensor in (k, v, where, self._k_rows)):
            wide = where.dtype in (torch.int32, torch.int64)
            writer(self.k, self.v, k, v, where.to(k.device, where.dtype if wide else torch.int64))
            for pool in (self._k_rows, self._v_rows):  # what autograd has saved of them is stale now
                torch.autograd.graph.increment_version(pool)
            return
        where = where.to(k.device, torch.int64)
        target = torch.where((where >= 0) & (where < rows), where, rows)
        self._k_rows.index_copy_(0, target, k)
        self._v_rows.index_copy_(0, target, v)

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_pages} pages of {self.page_size}, k {list(self.k.shape)}, v {list(self.v.shape)})"
        )


def _same_memory(rows: torch.Tensor, pool: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and rows.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()


def _writer_of(device_type: str) -> Callable[..., None] | None:
    """The function with which a device type's platform writes into pages, if it brings one."""
    from polyattn.plan import load_call, owner_of  # plans are made for structures, and import them

    reference = owner_of(device_type).cache_write
    try:
        return None if reference is None else load_call(reference)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # whose absence (Windows) costs speed alone
            raise
        return None


def _checked_slots(slots: Any, rows: int, page_size: int) -> torch.Tensor:
    if not isinstance(slots, torch.Tensor):
        listed = integer_row("slots", slots, "[T]")
        _check_highest(max(listed, default=-1), rows, page_size)
        return torch.tensor([max(slot, -1) for slot in listed], dtype=torch.int64, device="cpu")
    integer_tensor("slots", slots, 1, "[T]")
    if on_host(slots) and slots.numel():
        _check_highest(int(slots.max()), rows, page_size)
    return slots


def _check_highest(slot: int, rows: int, page_size: int) -> None:
    if slot >= rows:
        raise ValueError(f"slots: {slot} is past the pool's {rows} rows ({rows // page_size} pages of {page_size})")
