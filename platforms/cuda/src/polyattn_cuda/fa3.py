"""FlashAttention-3 as the installed build has it: `fa3-fwd` from the registry, or upstream's `flash_attn_3`."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Requires, Slot, varlen_padding
from polyattn_cuda.fa3_operator import BUILD


def backend() -> Backend:
    """The backend `fa3`, as the installed build has it."""
    name, hint = BUILD.package, "pip install fa3-fwd (Linux x86_64, CUDA 13, torch 2.10 or later)"
    return Backend(
        "fa3",
        (
            *(Slot(f"{_FORWARD}:{name}", replace(_FEATURES, kinds=kinds), bind) for name, kinds, bind in _slots()),
            *(Slot(f"{_TRAINING}:{name}", replace(_TRAINED, kinds=frozenset({name})), bind) for name, bind in _GRADS),
            *(Slot(f"{_FP8}:{name}", replace(_FP8_FEATURES, kinds=frozenset({name}))) for name in _FP8_SLOTS),
        ),
        requires=(Requires(name, "", hint),),
        check=_objections,
        tolerances={"bfloat16": 3e-2, "float16": 4e-3, "fp8": 0.1},
    )


_FORWARD, _FP8 = "polyattn_cuda.fa3_forward", "polyattn_cuda.fa3_fp8"
#: Slot, structure kinds, what binds it to one shape.
_SLOTS = (
    ("dense", frozenset({"dense"}), f"{_FORWARD}:bound_dense"),
    ("prefix_kv", frozenset({"prefix_kv"}), ""),
    ("key_padding", frozenset({"key_padding"}), ""),
    ("packed", frozenset({"packed"}), ""),
    ("spans", frozenset({"spans"}), ""),
    ("packed_spans", frozenset({"packed", "spans"}), ""),
)
_TRAINING = "polyattn_cuda.fa3_training"
_GRADS = (("dense", f"{_TRAINING}:bound_dense"), ("prefix_kv", ""))
_FP8_SLOTS = ("dense", "prefix_kv", *(("key_padding", "packed") if BUILD.varlen else ())) if BUILD.fp8 else ()

_FEATURES = Features(
    causal=True, softcap=BUILD.softcap, lse=True, gqa=True, deterministic=True, out=True,
    capture=True, dtypes=frozenset({"bfloat16", "float16"} if BUILD.fp16 else {"bfloat16"}),
    head_dims=range(8, 257, 8),
)  # fmt: skip
_TRAINED = Features(
    causal=True, gqa=True, backward=True, capture=True, dtypes=_FEATURES.dtypes, head_dims=range(8, 129, 8)
)  # fmt: skip
_FP8_FEATURES = replace(
    _FEATURES, dtypes=frozenset({"bfloat16", "float16"}), head_dims=range(16, 257, 16), quant=frozenset({"fp8"}),
    exact=False,
)  # fmt: skip


def _slots() -> tuple[tuple[str, frozenset[str], str], ...]:
    """Those of the build: without varlen it takes neither boundaries nor lengths."""
    return tuple(slot for slot in _SLOTS if BUILD.varlen or slot[0] not in ("key_padding", "packed"))


def _objections(request: Request, machine: Machine) -> tuple[str, ...]:
    reasons = list(varlen_padding.packs_in_place(request, machine))
    if machine.arch and machine.arch not in _ARCHS:
        reasons.append(f"{machine.arch} is none of the architectures it is built for, {', '.join(_ARCHS)}")
    cuda = machine.versions.get("cuda", "13")
    if BUILD.package == "fa3-fwd" and not cuda.startswith("13"):
        reasons.append(f"fa3-fwd is linked against CUDA 13, and this torch has {cuda}")
    if request.quant is not None and machine.arch and machine.arch != "sm_90":
        reasons.append(f"its FP8 needs sm_90, and this is {machine.arch}")
    if request.structure_facts.spans and not request.structure_facts.host:
        reasons.append("spans of documents need their lengths on the host (Packed.from_lengths)")
    return tuple(reasons)


_ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")
