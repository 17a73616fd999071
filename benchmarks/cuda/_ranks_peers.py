"""Attention over ranks as others do it: by hand with NCCL and FA3, and by the libraries that are installed.

Each maker takes this rank's shards q, k, v [1,rows,H,D] and gives a call that answers [1,rows,H,D].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _peers import MissingPeer, fa3, sdpa

Call = Callable[[], torch.Tensor]

#: torch 2.13 renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """FA3 of these, bound once; torch's SDPA where there is no FA3, such as on a processor."""
    if q.device.type == "cpu":
        run = sdpa(q, k, v)
        return lambda: run().transpose(1, 2)
    run = fa3(q, k, v)
    return lambda: run()[0]


def ulysses_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """An all-to-all each for q, k, v and the answer, into buffers that are kept."""
    ranks, (rows, heads, dim) = dist.get_world_size(), q.shape[1:]
    own = heads // ranks
    sent = [torch.empty(ranks, rows, own, dim, dtype=q.dtype, device=q.device) for _ in range(3)]
    received = [torch.empty_like(buffer) for buffer in sent]
    back = torch.empty_like(sent[0])
    run = kernel(*(buffer.view(1, ranks * rows, own, dim) for buffer in received))

    def call() -> torch.Tensor:
        for tensor, there, here in zip((q, k, v), sent, received, strict=True):
            there.copy_(tensor.view(rows, ranks, own, dim).transpose(0, 1))
            dist.all_to_all_single(here, there)
        dist.all_to_all_single(back, run().contiguous().view(ranks, rows, own, dim))
        return back.transpose(0, 1).reshape(1, rows, heads, dim)

    return call


def gather_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """An all-gather each for K and V, into buffers that are kept."""
    ranks = dist.get_world_size()
    whole = [torch.empty(1, ranks * k.shape[1], *k.shape[2:], dtype=k.dtype, device=k.device) for _ in range(2)]
    run = kernel(q, *whole)

    def call() -> torch.Tensor:
        for tensor, everything in zip((k, v), whole, strict=True):
            _all_gather(everything[0], tensor[0])
        return run()

    return call


def yunchang(ulysses: int, ring: int) -> Callable[..., Call]:
    """Its hybrid layer, with the fastest kernel of it that is installed."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        library, kernels = importlib.import_module("yunchang"), importlib.import_module("yunchang.kernels")
        globals_ = importlib.import_module("yunchang.globals")
        kinds = kernels.AttnType
        if q.device.type == "cpu":
            chosen = kinds.TORCH_MATH
        elif globals_.HAS_FLASH_ATTN_HOPPER:
            chosen = kinds.FA3
        else:
            chosen = kinds.FA if globals_.HAS_FLASH_ATTN else kinds.TORCH_CUDNN
        library.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())
        basic = "basic" if chosen in (kinds.FA3, kinds.FA) else "basic_pytorch"
        layer = library.LongContextAttention(ring_impl_type=basic, attn_type=chosen)
        return lambda: layer(q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=False)

    return make


def ring_flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Its ring over FlashAttention 2, the only kernel that it knows."""
    function = importlib.import_module("ring_flash_attn").ring_flash_attn_func
    if q.device.type == "cpu":
        raise MissingPeer("FlashAttention 2 needs a GPU")
    return lambda: function(q, k, v, causal=False, group=dist.group.WORLD)


def diffusers(ulysses: int, ring: int) -> Callable[..., Call]:
    """Its context parallelism, over cuDNN: its FA3 backend comes from the Hub alone."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        parallel = importlib.import_module("diffusers.models._modeling_parallel")
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        context = parallel.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        config: Any = parallel.ParallelConfig(context_parallel_config=context)
        mesh = dist.init_device_mesh(
            q.device.type, mesh_shape=context.mesh_shape, mesh_dim_names=context.mesh_dim_names
        )
        config.setup(dist.get_rank(), dist.get_world_size(), q.device, mesh=mesh)
        name = "native" if q.device.type == "cpu" else "_native_cudnn"
        backend = dispatch.AttentionBackendName(name)
        return lambda: dispatch.dispatch_attention_fn(q, k, v, backend=backend, parallel_config=config)

    return make
