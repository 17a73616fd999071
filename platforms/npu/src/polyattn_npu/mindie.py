"""`npu:mindie`: MindIE-SD's attention_forward and attention_forward_varlen, and what they would refuse or get wrong."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Slot, varlen_padding
from polyattn_npu import op_limits
from polyattn_npu.detection import FA_TYPE
from polyattn_npu.mindie_build import without_plugin
from polyattn_npu.mindie_package import REQUIRES, once_imported
from polyattn_npu.options import LASER, LAYOUT, OP_TYPES, NpuOptions, automatic_op, npu_options

#: Device classes that MindIE-SD knows; it calls others an invalid platform.
ARCHS = ("310P", *op_limits.ARCHS)

#: What runs here of what MindIE-SD calls op types.
_OPS = ("fused_attn_score", "prompt_flash_attn")
_FORWARD, _PACKED = "polyattn_npu.mindie_forward", "polyattn_npu.mindie_packed"
#: Kinds that run through attention_forward_varlen, which takes no op type and reads no variable.
_BY_BOUNDARIES = frozenset({"packed", "key_padding"})


def backend() -> Backend:
    """The backend `mindie`."""
    features = Features(gqa=True, v_dim=True, out=True, dtypes=op_limits.DTYPES, head_dims=op_limits.FUSION_HEAD_DIMS)
    return once_imported(
        Backend(
            "mindie",
            (
                Slot(f"{_FORWARD}:dense", features),
                Slot(f"{_FORWARD}:prefix_kv", replace(features, kinds=frozenset({"prefix_kv"}))),
                Slot(f"{_PACKED}:packed", replace(features, kinds=frozenset({"packed"}), causal=True)),
                Slot(f"{_PACKED}:key_padding", replace(features, kinds=frozenset({"key_padding"}), causal=True)),
                Slot(f"{_FORWARD}:mask", replace(features, kinds=frozenset({"mask"}), causal=True, window=True)),
            ),
            requires=REQUIRES,
            check=check,
            options=frozenset({"op_type", "opt_mode", "op_layout"}),
            tolerances={"float16": 4e-3, "bfloat16": 3e-2},
        )
    )


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Reasons against a request, before MindIE-SD or the op below would refuse it, or go on with another op."""
    chosen = npu_options(request.options)
    by_boundaries = request.structure_kind in _BY_BOUNDARIES or (
        # a causal prefix of the keys has no slot of its own: it runs as key padding
        request.structure_kind == "prefix_kv" and request.causal
    )
    by_kind = _of_documents if by_boundaries else _of_op
    packs_samples = by_boundaries and request.structure_kind != "packed"
    return (
        *without_plugin(machine),
        *op_limits.not_on_this_chip("MindIE-SD", ARCHS, machine),
        *op_limits.beyond_fusion(request, packs_samples=packs_samples),
        *by_kind(request, machine, chosen),
        *varlen_padding.packs_in_place(request, machine),
    )


def _of_documents(request: Request, machine: Machine, chosen: NpuOptions) -> tuple[str, ...]:
    reasons = []
    if not request.structure_facts.host:
        build = "KeyPadding" if request.structure_kind == "key_padding" else "Packed"
        reasons.append(
            "its op takes boundaries (cu_seqlens) as host integers, and only the device knows these: build the "
            f"{build} from host lengths, or with check=True, which reads them once"
        )
    if chosen.op_type not in (None, "fused_attn_score"):
        reasons.append(f"op_type={chosen.op_type!r} has no packed form: attention_forward_varlen is fused_attn_score")
    if chosen.opt_mode not in (None, "manual"):
        reasons.append(f"opt_mode={chosen.opt_mode!r}: attention_forward_varlen has one op: leave it out")
    if chosen.op_layout not in (None, LAYOUT):
        reasons.append(f"op_layout={chosen.op_layout!r}: documents and padding reach the op as TND alone: leave it out")
    if machine.arch == "310P":
        reasons.append("310P has prompt_flash_attn only, which takes no boundaries: npu:blocked needs none")
    return tuple(reasons)


def _of_op(request: Request, machine: Machine, chosen: NpuOptions) -> tuple[str, ...]:
    if chosen.opt_mode == "runtime":
        return (
            "opt_mode='runtime' times every op, swallows what they raise and may settle on laser attention, which "
            "ignores masks: 'manual' and 'static' say what runs",
        )
    if chosen.opt_mode == "static":
        return _of_static(machine, chosen)
    op = chosen.op_type or automatic_op(machine.arch)
    if op == LASER:
        return (f"op_type={LASER!r} is npu:laser's",)
    forced = machine.env.get(FA_TYPE)
    if forced and forced != op:
        return (_forced(forced, op, machine.arch),)
    of_op = _of_prompt(request, machine) if op == "prompt_flash_attn" else _of_fused(machine)
    return (*of_op, *_of_layout(request, chosen.op_layout or LAYOUT))


def _forced(forced: str, op: str, arch: str) -> str:
    """What MindIE-SD's manual mode makes of its variable, which wins over the op asked for."""
    static = "or ask for NpuOptions(opt_mode='static'), which does not read it"
    if forced not in OP_TYPES:
        return f"{FA_TYPE}={forced!r} is no op of MindIE-SD's manual mode, which raises for it: unset it, {static}"
    runs_here = forced in _OPS and not (forced == "prompt_flash_attn" and arch == "A5")
    way_out = f", ask for NpuOptions(op_type={forced!r})" if runs_here else ""
    return f"{FA_TYPE}={forced!r} is asked of MindIE-SD's manual mode in place of {op}: unset it{way_out}, {static}"


def _of_static(machine: Machine, chosen: NpuOptions) -> tuple[str, ...]:
    reasons = []
    if chosen.op_type is not None or chosen.op_layout is not None:
        reasons.append("opt_mode='static' chooses op and layout itself: leave op_type and op_layout out")
    return (*reasons, *_of_fused(machine))


def _of_fused(machine: Machine) -> tuple[str, ...]:
    if machine.arch != "310P":
        return ()
    return ("310P has prompt_flash_attn only: NpuOptions(op_type='prompt_flash_attn'), or leave op_type out",)


def _of_prompt(request: Request, machine: Machine) -> tuple[str, ...]:
    reasons = []
    if machine.arch == "A5":
        reasons.append("MindIE-SD runs fused_attn_score for prompt_flash_attn on A5: leave op_type out to have that")
    way_out = "npu:blocked takes it" if machine.arch == "310P" else "leave op_type out"
    if request.dtype == "float32":
        reasons.append(f"prompt_flash_attn takes float16 and bfloat16, not float32: {way_out}")
    if request.num_heads != request.num_kv_heads:
        reasons.append(
            f"MindIE-SD does not tell prompt_flash_attn of {request.num_kv_heads} KV heads for "
            f"{request.num_heads} query heads (GQA): {way_out}"
        )
    if request.v_head_dim != request.head_dim or request.head_dim % 16:
        reasons.append(f"prompt_flash_attn takes one head_dim, a multiple of 16, not {request.head_dim} "
                       f"with values of {request.v_head_dim}: {way_out}")  # fmt: skip
    if request.structure_kind == "mask":
        reasons.append(f"prompt_flash_attn has no answer for rows that a mask hides everything from: {way_out}")
    return tuple(reasons)


def _of_layout(request: Request, layout: str) -> tuple[str, ...]:
    if layout != "BSH":
        return ()
    if request.num_heads != request.num_kv_heads or request.v_head_dim != request.head_dim:
        return (
            "MindIE-SD reshapes keys and values to BSH with the query's heads and head_dim: "
            f"{request.num_kv_heads} KV heads for {request.num_heads}, values of {request.v_head_dim} for "
            f"{request.head_dim} need op_layout 'BSND' or 'BNSD'",
        )
    return ()
