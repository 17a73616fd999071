"""Stand-in for fastvideo_kernel 0.3.5 on CPU tensors: its entry points, with the limits of its kernels made errors.

Where the real kernels answer with numbers that mean nothing it raises `GarbageError`. `install(compiled=True)` has the
extension load on an sm_90 device, so that blocks of 64 go to it; else Triton's kernels serve everything, as they do
where the extension does not load. `install(device=False)` is an import on a machine without a device.
"""

from __future__ import annotations

import math
import os
import sys
from types import ModuleType
from typing import Any

import torch

#: What it passes for among installed distributions.
VERSIONS = {"fastvideo-kernel": "0.3.5", "einops": "0.8.1", "triton": "3.6.0"}

_PARTS = (
    "fastvideo_kernel",
    "fastvideo_kernel.ops",
    "fastvideo_kernel.block_sparse_attn",
    "fastvideo_kernel.block_sparse_attn_256",
)
_state: dict[str, Any] = {"compiled": False}


class GarbageError(RuntimeError):
    """The real kernel would answer here, with numbers that mean nothing."""


class _NoDevice:
    """Fails the package's import as Triton does where it finds no driver."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "fastvideo_kernel":
            raise RuntimeError("0 active drivers ([]). There should only be one.")


_no_device = _NoDevice()


def install(compiled: bool = False, device: bool = True) -> None:
    """Be `fastvideo_kernel`."""
    uninstall()
    if not device:
        sys.meta_path.insert(0, _no_device)
        return
    _state["compiled"] = compiled
    package, ops, sparse, sparse_256 = (ModuleType(name) for name in _PARTS)
    package.__path__ = []
    for function in (video_sparse_attn, video_sparse_attn_bshd):
        setattr(ops, function.__name__, function)
        setattr(package, function.__name__, function)
    for function in (block_sparse_attn, block_sparse_attn_from_indices, _get_sm90_ops, _is_sm90, _force_triton):
        setattr(sparse, function.__name__, function)
    for function in (
        block_sparse_attn_128, block_sparse_attn_128_bshd, block_sparse_attn_256, block_sparse_attn_256_bshd,
    ):  # fmt: skip
        setattr(sparse_256, function.__name__, function)
    package.block_sparse_attn = block_sparse_attn  # the function hides the module of its name
    package.block_sparse_attn_from_indices = block_sparse_attn_from_indices
    sys.modules.update(zip(_PARTS, (package, ops, sparse, sparse_256), strict=True))


def uninstall() -> None:
    """Take it out again."""
    if _no_device in sys.meta_path:
        sys.meta_path.remove(_no_device)
    for name in _PARTS:
        sys.modules.pop(name, None)


def _get_sm90_ops() -> tuple[Any, Any]:
    return (_compiled, _compiled) if _state["compiled"] else (None, None)


def _is_sm90() -> bool:
    return True


def _force_triton() -> bool:
    return "1" in (os.environ.get("FASTVIDEO_VSA_TRITON"), os.environ.get("FASTVIDEO_KERNEL_VSA_FORCE_TRITON"))


def video_sparse_attn(
    q, k, v, variable_block_sizes, q_variable_block_sizes, topk, block_size=64, compress_attn_weight=None
):
    """[B,H,S,D]. An int is the edge of a cube; no gate is a gate of one; means and scores are rounded."""
    volume = math.prod((block_size,) * 3 if isinstance(block_size, int) else block_size)
    if q.shape[:2] != k.shape[:2] or k.shape != v.shape:
        raise ValueError("Expected q/k/v to have the same batch and head dimensions.")
    for x, sizes in ((q, q_variable_block_sizes), (k, variable_block_sizes), (v, variable_block_sizes)):
        _check_blocks(x, sizes, volume)
        _check_pads(x, sizes, volume)
    means = [
        (x.float().unflatten(2, (-1, volume)).sum(dim=3) / sizes[:, None]).to(x.dtype)
        for x, sizes in ((q, q_variable_block_sizes), (k, variable_block_sizes), (v, variable_block_sizes))
    ]
    scores = means[0] @ means[1].transpose(-2, -1) / q.shape[-1] ** 0.5
    coarse = (scores.softmax(dim=-1) @ means[2]).repeat_interleave(volume, dim=2)
    function = {64: block_sparse_attn, 128: block_sparse_attn_128, 256: block_sparse_attn_256}.get(
        volume, block_sparse_attn
    )
    fine = function(q, k, v, _bisected(scores, topk), variable_block_sizes)[0]
    return coarse + fine if compress_attn_weight is None else coarse * compress_attn_weight + fine


def video_sparse_attn_bshd(
    q, k, v, variable_block_sizes, q_variable_block_sizes, topk, block_size=64, compress_attn_weight=None
):
    """[B,S,H,D], for blocks of 128 and 256 alone."""
    volume = math.prod((block_size,) * 3 if isinstance(block_size, int) else block_size)
    if volume not in (128, 256):
        raise ValueError("video_sparse_attn_bshd is only defined for block_elements=128 or 256 ")
    gate = None if compress_attn_weight is None else compress_attn_weight.transpose(1, 2)
    first = (x.transpose(1, 2) for x in (q, k, v))
    out = video_sparse_attn(*first, variable_block_sizes, q_variable_block_sizes, topk, block_size, gate)
    return out.transpose(1, 2).contiguous()


def block_sparse_attn(q, k, v, block_map, variable_block_sizes):
    """Blocks of 64, by a map [B,H,n_q,n_kv] (or without B)."""
    block_map = (block_map.unsqueeze(0) if block_map.dim() == 3 else block_map).to(torch.bool)
    count = block_map.sum(dim=-1, dtype=torch.int32)
    order = block_map.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    listed = torch.arange(order.shape[-1]) < count[..., None]
    return block_sparse_attn_from_indices(q, k, v, order.where(listed, -1), count, variable_block_sizes)


def block_sparse_attn_from_indices(q, k, v, q2k_idx, q2k_num, variable_block_sizes):
    """Blocks of 64, by lists; only entries below the count are read."""
    for x in (q2k_idx, q2k_num, variable_block_sizes):
        assert x.dtype in (torch.int32, torch.int64)
    if _state["compiled"] and not _force_triton():
        return _compiled(q, k, v, q2k_idx, q2k_num, variable_block_sizes)
    return _triton(q, k, v, q2k_idx, q2k_num, variable_block_sizes)


def block_sparse_attn_128(q, k, v, logical_block_map_128, logical_variable_block_sizes_128):
    """[B,H,S,D]: each block as two of 64."""
    return _children(q, k, v, logical_block_map_128, logical_variable_block_sizes_128, 2)


def block_sparse_attn_256(q, k, v, logical_block_map_256, logical_variable_block_sizes_256):
    """[B,H,S,D]: each block as four of 64."""
    return _children(q, k, v, logical_block_map_256, logical_variable_block_sizes_256, 4)


def block_sparse_attn_128_bshd(q, k, v, logical_block_map_128, logical_variable_block_sizes_128):
    """[B,S,H,D]; what stands for the LSE stays [B,H,S]."""
    first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, aux = block_sparse_attn_128(*first, logical_block_map_128, logical_variable_block_sizes_128)
    return out.transpose(1, 2).contiguous(), aux


def block_sparse_attn_256_bshd(q, k, v, logical_block_map_256, logical_variable_block_sizes_256):
    """As the one of 128."""
    first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, aux = block_sparse_attn_256(*first, logical_block_map_256, logical_variable_block_sizes_256)
    return out.transpose(1, 2).contiguous(), aux


def _children(q, k, v, block_map, sizes, parts):
    """Route A: the map repeated on both sides, sizes cut into steps of 64; always Triton's kernel."""
    block_map = block_map.unsqueeze(0) if block_map.dim() == 3 else block_map
    fine_map = block_map.repeat_interleave(parts, dim=2).repeat_interleave(parts, dim=3)
    small = (sizes.to(torch.int32)[:, None] - 64 * torch.arange(parts, dtype=torch.int32)).clamp(0, 64).flatten()
    count = fine_map.sum(dim=-1, dtype=torch.int32)
    order = fine_map.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return _triton(q, k, v, order, count, small)


def _triton(q, k, v, lists, counts, sizes):
    """Triton's kernel: as many KV heads, a head dim that is a power of two; weights in bfloat16, so no other dtype."""
    if q.shape[1] != k.shape[1]:
        raise GarbageError("fewer KV heads than query heads are read out of bounds")
    if q.shape[-1] & (q.shape[-1] - 1):
        raise ValueError(f"arange's arguments must be a power of 2, got {q.shape[-1]}")
    out, lse = _attend(q, k, v, lists, counts, sizes)
    return out, lse / math.log(2.0)


def _compiled(q, k, v, lists, counts, sizes):
    """The kernel for sm_90: one sample, head dims 64 and 128, no empty list; -sqrt(D) times the LSE, [B,H,S,1]."""
    if q.shape[0] != 1:
        raise RuntimeError("Batch dim must be 1")
    if q.shape[-1] not in (64, 128):
        raise GarbageError(f"head_dim {q.shape[-1]}: its output is left unwritten")
    if bool((counts == 0).any()):
        raise GarbageError("an empty list is read at index -1")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out, lse = _attend(q, k, v, lists, counts, sizes)
    return out, (-math.sqrt(q.shape[-1]) * lse).unsqueeze(3)


def _attend(q, k, v, lists, counts, sizes):
    """Blocks of 64; scores by head_dim ** -0.5; weights rounded to bfloat16."""
    if {q.dtype, k.dtype, v.dtype} != {torch.bfloat16}:
        raise TypeError(f"Both operands must be same dtype. Got bf16 and {q.dtype}")
    for x in (k, v):
        _check_blocks(x, sizes, 64)
        _check_pads(x, sizes, 64)
    number = q.shape[2] // 64
    assert q.shape[2] % 64 == 0
    assert lists.shape[2] == counts.shape[2] == number
    keys = sizes.numel()
    listed = torch.arange(lists.shape[3]) < counts[..., None]
    if bool(((lists < 0) | (lists >= keys))[listed].any()):
        raise GarbageError("a block that does not exist is read")
    first = lists[..., :1].clamp(min=0).to(torch.int64)
    if bool(((sizes[first] == 0) & listed[..., :1]).any()):
        raise GarbageError("an empty block that is visited first makes its rows NaN")
    kept = torch.zeros(*lists.shape[:3], keys + 1, dtype=torch.bool)
    kept.scatter_(3, lists.to(torch.int64).where(listed, keys), True)
    place = torch.arange(64 * keys)
    seen = kept[..., :keys].repeat_interleave(64, dim=3) & (place % 64 < sizes.repeat_interleave(64))
    seen = seen.repeat_interleave(64, dim=2)
    scores = q.float() @ k.float().transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    peak = scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - peak).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = weights.to(torch.bfloat16).float() @ v.float() / total.clamp(min=1e-30)
    return out.to(q.dtype), (peak + total.log()).squeeze(3)


def _check_blocks(x, sizes, volume):
    if x.shape[2] % volume or x.shape[2] // volume != sizes.numel():
        raise ValueError(f"{x.shape[2]} rows are not {sizes.numel()} blocks of {volume}")
    if volume not in (64, 128, 256):
        raise ValueError(f"blocks of {volume}")


def _check_pads(x, sizes, volume):
    pads = torch.arange(volume) >= sizes[:, None]
    if bool((x.unflatten(2, (-1, volume)) != 0)[:, :, pads].any()):
        raise GarbageError("pad rows that are not 0 are summed into means, and meet weights of 0")


def _bisected(scores, topk):
    """Its choice: above the threshold that 32 steps of bisection find, then the lowest at it, while there is room."""
    topk = min(topk, scores.shape[-1])
    numbers = scores.float()
    finite = numbers.where(numbers > float("-inf"), float("inf"))
    high = numbers.amax(dim=-1, keepdim=True)
    low = torch.minimum(finite.amin(dim=-1, keepdim=True), high)
    for _ in range(32):
        middle = (low + high) * 0.5
        enough = (numbers >= middle).sum(dim=-1, keepdim=True) >= topk
        low, high = middle.where(enough, low), high.where(enough, middle)
    above, ties = numbers > low, numbers == low
    room = topk - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= room))
