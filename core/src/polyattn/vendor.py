"""The vendor's door: the records a platform package fills in. Standard library only.

A platform package registers one entry point in the group `polyattn.platforms` that returns a `Platform`; a third party
adds a backend to an existing platform through `polyattn.backends`, whose entry point is named "<platform>.<backend>"
and returns a `Backend`. An entry point imports the standard library and this module, nothing else.

A slot is called as

    f(q, k, v, out, *, meta, causal, scale, window, softcap, need_lse, options) -> (out, lse | None)

q, k, v      [B,S,H,D], packed [T,H,D]; paged: k and v are pools [pages,page_size,Hk,D]; any strides, one dtype
out          None, or the buffer to write; a slot that claims `out` returns that same tensor
meta         what the structure prepared for this device, once for all layers: None for dense, else a `KeyPaddingMeta`,
             `MaskMeta`, `PackedMeta`, `SpansMeta`, `PagedMeta`, `VideoTilesMeta` (which carries the call's gate) or
             `BlockMapMeta`
causal       bottom-right aligned; `window` (left, right) likewise, None unbounded, its right side 0 with causal
scale        a float, 0.0 means 0.0
softcap      c > 0: scores become c*tanh(scores/c) before masks; 0.0: none
need_lse     return LSE in float32, natural log: [B,H,Sq] or [H,T]; -inf where no key is visible
options      the caller's options for this platform; then, where the request is quantised, its `Quant`

The answer follows polyattn's conventions: a row with no visible key is 0, keys that no query may see never matter
whatever they hold, no input is modified. A slot never asks which platform is current, never drops an argument and
never edits process-global state of torch.

>>> from polyattn.vendor import Backend, Features, Machine, Request, Slot, TensorFacts, resolve
>>> toy = Backend("toy", (Slot("toy:dense", Features(dtypes=frozenset({"float32"}))),))
>>> facts = TensorFacts.contiguous((1, 8, 2, 64), "float32")
>>> resolve(Request(facts, facts, facts, causal=True), Machine("toy", "cpu"), [toy])[0].reasons
('causal is not supported',)
"""

import importlib
from typing import TYPE_CHECKING

from polyattn.door.backend import Backend, Features, Options, Requires, Slot
from polyattn.door.capability import Capability, capabilities_of
from polyattn.door.loading import is_here, load_failure, loaded_last
from polyattn.door.platform import API_LEVEL, Declined, Found, Machine, Platform
from polyattn.door.request import KINDS, Request, StructureFacts, TensorFacts, VideoFacts
from polyattn.door.resolution import Accepted, Decision, Rejected, missing_requirements, resolve, unmet

if TYPE_CHECKING:
    from polyattn.backends import flash2 as flash2
    from polyattn.backends import flash2_calls as flash2_calls
    from polyattn.backends import pools as pools
    from polyattn.backends import sight as sight
    from polyattn.backends import torch_varlen as torch_varlen
    from polyattn.backends import varlen as varlen
    from polyattn.backends import varlen_padding as varlen_padding
    from polyattn.backends import visibility as visibility
    from polyattn.backends.calls import Result as Result
    from polyattn.backends.calls import Window as Window
    from polyattn.backends.calls import wants_grad as wants_grad
    from polyattn.backends.calls import written as written
    from polyattn.backends.constant import device_constant as device_constant
    from polyattn.backends.derived import derived as derived
    from polyattn.backends.empty import empty_attention as empty_attention
    from polyattn.backends.flex import flex_backend as flex_backend
    from polyattn.backends.fused import positive_scale as positive_scale
    from polyattn.backends.generic import generic_backends as generic_backends
    from polyattn.backends.layout import aligned as aligned
    from polyattn.backends.layout import reachable as reachable
    from polyattn.backends.layout import walkable as walkable
    from polyattn.backends.masked import masked as masked
    from polyattn.backends.masked import under_positions as under_positions
    from polyattn.backends.row_ops import TORCH_ROWS as TORCH_ROWS
    from polyattn.backends.row_ops import TRITON_ROWS as TRITON_ROWS
    from polyattn.backends.row_ops import RowOps as RowOps
    from polyattn.backends.square import on_square as on_square
    from polyattn.backends.triton import triton_backend as triton_backend
    from polyattn.backends.visibility import Visibility as Visibility
    from polyattn.compositions.loop import document_loop as document_loop
    from polyattn.compositions.pack import packed_rows as packed_rows
    from polyattn.compositions.segments import spans_into as spans_into
    from polyattn.compositions.slice import prefix as prefix
    from polyattn.compositions.slice import prefix_into as prefix_into
    from polyattn.environment import warn as warn
    from polyattn.kernels.pages import write_rows as write_rows
    from polyattn.kernels.quantise import quantise_fp8 as quantise_fp8
    from polyattn.kernels.quantise import quantise_fp8_packed as quantise_fp8_packed
    from polyattn.kernels.tails import repair_documents as repair_documents
    from polyattn.kernels.tails import repair_samples as repair_samples
    from polyattn.machine import installed_versions as installed_versions
    from polyattn.operators import define_once as define_once
    from polyattn.quant import Quant as Quant
    from polyattn.structures.block_map import BlockMapMeta as BlockMapMeta
    from polyattn.structures.key_padding import KeyPaddingMeta as KeyPaddingMeta
    from polyattn.structures.mask import MaskMeta as MaskMeta
    from polyattn.structures.packed_meta import PackedMeta as PackedMeta
    from polyattn.structures.paged import PagedMeta as PagedMeta
    from polyattn.structures.spans import SpansMeta as SpansMeta
    from polyattn.structures.transfer import send as send
    from polyattn.structures.video_meta import VideoTilesMeta as VideoTilesMeta

__all__ = [
    "API_LEVEL",
    "KINDS",
    "Accepted",
    "Backend",
    "Capability",
    "Decision",
    "Declined",
    "Features",
    "Found",
    "Machine",
    "Options",
    "Platform",
    "Rejected",
    "Request",
    "Requires",
    "Slot",
    "StructureFacts",
    "TensorFacts",
    "VideoFacts",
    "capabilities_of",
    "is_here",
    "load_failure",
    "loaded_last",
    "missing_requirements",
    "resolve",
    "unmet",
]

#: Published for the modules behind an entry point (slots, backends); loaded on first use, since most of it needs torch.
_LAZY = {
    "document_loop": "polyattn.compositions.loop",
    "Quant": "polyattn.quant",
    "Result": "polyattn.backends.calls",
    "RowOps": "polyattn.backends.row_ops",
    "TORCH_ROWS": "polyattn.backends.row_ops",
    "TRITON_ROWS": "polyattn.backends.row_ops",
    "aligned": "polyattn.backends.layout",
    "derived": "polyattn.backends.derived",
    "device_constant": "polyattn.backends.constant",
    "empty_attention": "polyattn.backends.empty",
    "flash2": "polyattn.backends.flash2",
    "flash2_calls": "polyattn.backends.flash2_calls",
    "flex_backend": "polyattn.backends.flex",
    "masked": "polyattn.backends.masked",
    "under_positions": "polyattn.backends.masked",
    "on_square": "polyattn.backends.square",
    "packed_rows": "polyattn.compositions.pack",
    "pools": "polyattn.backends.pools",
    "positive_scale": "polyattn.backends.fused",
    "prefix": "polyattn.compositions.slice",
    "prefix_into": "polyattn.compositions.slice",
    "quantise_fp8": "polyattn.kernels.quantise",
    "quantise_fp8_packed": "polyattn.kernels.quantise",
    "reachable": "polyattn.backends.layout",
    "repair_documents": "polyattn.kernels.tails",
    "repair_samples": "polyattn.kernels.tails",
    "send": "polyattn.structures.transfer",
    "sight": "polyattn.backends.sight",
    "spans_into": "polyattn.compositions.segments",
    "torch_varlen": "polyattn.backends.torch_varlen",
    "triton_backend": "polyattn.backends.triton",
    "warn": "polyattn.environment",
    "wants_grad": "polyattn.backends.calls",
    "written": "polyattn.backends.calls",
    "BlockMapMeta": "polyattn.structures.block_map",
    "KeyPaddingMeta": "polyattn.structures.key_padding",
    "MaskMeta": "polyattn.structures.mask",
    "PackedMeta": "polyattn.structures.packed_meta",
    "PagedMeta": "polyattn.structures.paged",
    "SpansMeta": "polyattn.structures.spans",
    "VideoTilesMeta": "polyattn.structures.video_meta",
    "define_once": "polyattn.operators",
    "generic_backends": "polyattn.backends.generic",
    "installed_versions": "polyattn.machine",
    "Visibility": "polyattn.backends.visibility",
    "Window": "polyattn.backends.calls",
    "varlen": "polyattn.backends.varlen",
    "varlen_padding": "polyattn.backends.varlen_padding",
    "visibility": "polyattn.backends.visibility",
    "walkable": "polyattn.backends.layout",
    "write_rows": "polyattn.kernels.pages",
}
#: Of these, the modules that are published whole.
_ROOMS = frozenset(
    {"flash2", "flash2_calls", "pools", "sight", "torch_varlen", "varlen", "varlen_padding", "visibility"}
)


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'polyattn.vendor' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value: object = module if name in _ROOMS else getattr(module, name)
    globals()[name] = value
    return value
