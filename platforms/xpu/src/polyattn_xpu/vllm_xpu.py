"""vllm-xpu-kernels, FlashAttention 2 for Xe2 and Xe3: dense, padding and documents packed, pages; inference alone."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    loaded_last,
    pools,
    varlen_padding,
)
from polyattn_xpu import vllm_xpu_build as build

_FORWARD = "polyattn_xpu.vllm_xpu_forward"


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: the device, the release, padding that packing would move, pages."""
    reasons = []
    if not build.served(machine.arch):
        reasons.append(f"architecture {machine.arch} is not one it has kernels for: {', '.join(build.NAMES)}")
    reasons += _release(machine)
    reasons += varlen_padding.packs_in_place(request, machine)
    return (*reasons, *_pages(request))


def _release(machine: Machine) -> tuple[str, ...]:
    """A form that a release does not have runs in PyTorch, slowly and with host reads, and nothing says so."""
    found = machine.versions.get(build.PACKAGE, build.KNOWN)
    if (found.partition("+")[0] + ".").startswith(build.KNOWN + "."):
        return ()
    way = f"pip install '{build.PACKAGE}=={build.KNOWN}.*'"
    return (f"package {build.PACKAGE} {found}: what it is compiled for is known of {build.KNOWN} alone: {way}",)


def _pages(request: Request) -> tuple[str, ...]:
    facts = request.structure_facts
    if request.structure_kind != "paged" or facts.page_size is None:
        return ()
    reasons = []
    if not facts.host:
        reasons.append("a block table on the device may name pages that are not there, and its kernel would read them")
    if facts.query_layout == "padded":
        reasons.append("padded queries over pages are not supported, only batched or packed ones")
    if not all(pools.row_major(pool) for pool in (request.k, request.v)):
        reasons.append("its kernel wants pools that are contiguous; this one would be copied")
    heads = request.num_heads // max(request.num_kv_heads, 1)
    if heads > build.MOST_HEADS:
        reasons.append(f"{heads} query heads on one KV head over pages, at most {build.MOST_HEADS} are compiled")
    elif facts.page_size in build.PAGE_SIZES and not build.decodes(heads, request.head_dim, facts.page_size):
        reasons.append(
            f"its wheel has no kernel for head_dim {request.head_dim} and {heads} query heads on one KV head over "
            f"pages of {facts.page_size}"
        )
    if not request.causal and request.head_dim in build.PAGED_CAUSAL - build.PAGED:
        reasons.append(f"head_dim {request.head_dim} over pages is compiled for causal calls only")
    return tuple(reasons)


def _slots() -> tuple[Slot, ...]:
    """One a structure; where a form is not compiled for a head dim, the slot pads to one that is."""
    unpaged = Features(
        causal=True, lse=True, gqa=True, deterministic=True, out=True,
        dtypes=frozenset({"float16", "bfloat16"}), head_dims=build.HEAD_DIMS,
    )  # fmt: skip
    over_pages = replace(
        unpaged, kinds=frozenset({"paged"}), lse=False, head_dims=build.PAGED_CAUSAL, page_sizes=build.PAGE_SIZES
    )
    return (
        *(
            Slot(f"{_FORWARD}:{kind}", replace(unpaged, kinds=frozenset({kind})))
            for kind in ("dense", "prefix_kv", "packed", "key_padding")
        ),
        Slot("polyattn_xpu.vllm_xpu_pages:paged", over_pages),
    )


def backend() -> Backend:
    """`xpu:vllm_xpu`."""
    hint = "pip install vllm-xpu-kernels beside the XPU build of torch that its release notes name"
    slots = _slots()
    return Backend(
        "vllm_xpu",
        slots,
        requires=(Requires(build.PACKAGE, build.KNOWN, hint),),
        check=loaded_last(check, slots, build.PACKAGE, build.MODULE, build.operator),
        options=frozenset({"finite_pages"}),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
