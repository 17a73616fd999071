"""`npu:mindie`: MindIE-SD's attention_forward and attention_forward_varlen, and what they would refuse or get wrong."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Features, Machine, Request, Slot, varlen_padding
from polyattn_npu.mindie_forward import LAYOUT, automatic_op
from polyattn_npu.mindie_package import REQUIRES, without_plugin
from polyattn_npu.options import FA_TYPE, LASER, NpuOptions, asked_of

#: Limits of the op below, npu_fusion_attention. Documents also say 768 for head_dim, and 1K or 2K for documents.
LARGEST_HEAD_DIM, MOST_HEADS, MOST_ROWS, MOST_DOCUMENTS = 512, 256, 2**20, 1024
#: Device classes that MindIE-SD knows.
ARCHS = ("310P", "A2", "A3", "A5")

#: What runs here of what MindIE-SD calls op types.
_OPS = ("fused_attn_score", "prompt_flash_attn")
_FORWARD, _VARLEN = "polyattn_npu.mindie_forward", "polyattn_npu.mindie_varlen"
#: Kinds that run through attention_forward_varlen, which takes no op type and reads no variable.
_BY_BOUNDARIES = frozenset({"packed", "key_padding"})


def backend() -> Backend:
    """The backend `mindie`."""
    features = Features(
        gqa=True, v_dim=True, out=True, dtypes=frozenset({"bfloat16", "float16", "float32"}),
        head_dims=range(1, LARGEST_HEAD_DIM + 1),
    )  # fmt: skip
    return Backend(
        "mindie",
        (
            Slot(f"{_FORWARD}:dense", features),
            Slot(f"{_FORWARD}:prefix_kv", replace(features, kinds=frozenset({"prefix_kv"}))),
            Slot(
                f"{_VARLEN}:packed",
                replace(features, kinds=frozenset({"packed"}), causal=True, max_documents=MOST_DOCUMENTS),
            ),
            Slot(f"{_VARLEN}:key_padding", replace(features, kinds=frozenset({"key_padding"}), causal=True)),
            Slot(f"{_FORWARD}:mask", replace(features, kinds=frozenset({"mask"}), causal=True, window=True)),
        ),
        requires=REQUIRES,
        check=check,
        options=frozenset({"op_type", "opt_mode", "op_layout"}),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """Reasons against a request, before MindIE-SD or the op below would refuse it, or go on with another op."""
    asked = asked_of(request.options)
    # of prefixes, causal ones run as padding does
    by_boundaries = request.structure_kind in _BY_BOUNDARIES or (
        request.structure_kind == "prefix_kv" and request.causal
    )
    by_kind = _of_documents if by_boundaries else _of_op
    return (
        *without_plugin(machine),
        *unknown_arch(machine),
        *_sizes(request),
        *by_kind(request, machine, asked),
        *varlen_padding.packs_in_place(request, machine),
    )


def unknown_arch(machine: Machine) -> tuple[str, ...]:
    """Against a device class that MindIE-SD calls an invalid platform; one not known yet has the benefit of doubt."""
    if not machine.arch or machine.arch in ARCHS:
        return ()
    return (f"MindIE-SD knows the device classes {', '.join(ARCHS)}, and this is {machine.arch}",)


def _sizes(request: Request) -> tuple[str, ...]:
    reasons = []
    if request.v_head_dim > request.head_dim:
        reasons.append(f"value head_dim {request.v_head_dim} is larger than {request.head_dim}, which its op refuses")
    if request.num_heads > MOST_HEADS:
        reasons.append(f"{request.num_heads} heads are more than the {MOST_HEADS} that its op takes")
    longest = max(tensor.shape[-3] for tensor in (request.q, request.k))
    if longest > MOST_ROWS:
        reasons.append(f"{longest} rows are more than the {MOST_ROWS} that its op takes")
    return tuple(reasons)


def _of_documents(request: Request, machine: Machine, asked: NpuOptions) -> tuple[str, ...]:
    reasons = []
    if not request.structure_facts.host:
        build = "KeyPadding" if request.structure_kind == "key_padding" else "Packed"
        reasons.append(
            "its op takes boundaries (cu_seqlens) as host integers, and only the device knows these: build the "
            f"{build} from host lengths, or with check=True, which reads them once"
        )
    if request.structure_kind == "key_padding" and request.q.shape[0] > MOST_DOCUMENTS:
        reasons.append(f"{request.q.shape[0]} samples are more than the {MOST_DOCUMENTS} documents that its op takes")
    if asked.op_type not in (None, "fused_attn_score"):
        reasons.append(f"op_type={asked.op_type!r} has no packed form: attention_forward_varlen is fused_attn_score")
    if machine.arch == "310P":
        reasons.append("310P has prompt_flash_attn only, which takes no boundaries")
    return tuple(reasons)


def _of_op(request: Request, machine: Machine, asked: NpuOptions) -> tuple[str, ...]:
    if asked.opt_mode == "runtime":
        return (
            "opt_mode='runtime' times every op, swallows what they raise and may settle on laser attention, which "
            "ignores masks: 'manual' and 'static' say what runs",
        )
    if asked.opt_mode == "static":
        return _of_static(machine, asked)
    op = asked.op_type or automatic_op(machine.arch)
    if op == LASER:
        return (f"op_type={LASER!r} is npu:laser's",)
    forced = machine.env.get(FA_TYPE)
    if forced and forced != op:
        way_out = f", ask for NpuOptions(op_type={forced!r})" if forced in _OPS else ""
        return (
            f"{FA_TYPE}={forced!r} replaces {op} in MindIE-SD's manual mode: unset it{way_out}, or ask for "
            "NpuOptions(opt_mode='static'), which does not read it",
        )
    of_op = _of_prompt(request, machine) if op == "prompt_flash_attn" else _of_fused(machine)
    return (*of_op, *_of_layout(request, asked.op_layout or LAYOUT))


def _of_static(machine: Machine, asked: NpuOptions) -> tuple[str, ...]:
    reasons = []
    if asked.op_type is not None or asked.op_layout is not None:
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
    if request.dtype == "float32":
        reasons.append("prompt_flash_attn takes float16 and bfloat16, not float32")
    if request.num_heads != request.num_kv_heads:
        reasons.append(
            f"MindIE-SD does not tell prompt_flash_attn of {request.num_kv_heads} KV heads for "
            f"{request.num_heads} query heads (GQA)"
        )
    if request.v_head_dim != request.head_dim or request.head_dim % 16:
        reasons.append(f"prompt_flash_attn takes one head_dim, a multiple of 16, not {request.head_dim} "
                       f"with values of {request.v_head_dim}")  # fmt: skip
    if request.structure_kind == "mask":
        reasons.append("prompt_flash_attn has no answer for rows that a mask hides everything from")
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
