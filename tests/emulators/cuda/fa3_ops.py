"""Stand-in for fa3-fwd 0.0.3: `torch.ops.fa3_fwd.fwd` on CPU tensors, in float64, with that build's refusals.

What it proves is our call into the op; the op's meaning is written here from the vendor's contract. Rows that the real
kernel leaves unwritten hold NaN. Build: bf16 and fp8 e4m3, no fp16, no windows, no backward, pages by TMA alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch

#: Whether a non-finite V row behind a document's end, in the same tile of keys, spoils the document (0 * NaN is NaN).
TAIL_POISON = True

#: What it passes for among installed distributions.
VERSIONS = {"fa3-fwd": "0.0.3"}

SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,"
    "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,"
    "Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,"
    "int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,"
    "Tensor? k_descale = None,Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,"
    "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
    "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,"
    "int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)

_DISABLED = ("BACKWARD", "PAGEDKV", "LOCAL", "FP16")
_ENABLED = (
    "SPLIT", "APPENDKV", "SOFTCAP", "PACKGQA", "FP8", "VARLEN", "CLUSTER", "HDIM64", "HDIM96", "HDIM128", "HDIM192",
    "HDIM256", "SM8x",
)  # fmt: skip

#: What the wheel's `fa3_fwd_config` says.
CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{name}": name in _DISABLED for name in (*_DISABLED, *_ENABLED)},
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
    }
}

_MODULES = ("fa3_fwd", "fa3_fwd._C", "fa3_fwd_config", "fa3_fwd_interface")
_registered: list[torch.library.Library] = []


def install() -> None:
    """Register the op and put the wheel's modules into `sys.modules`; doing it again changes nothing."""
    if not _registered:
        library = torch.library.Library("fa3_fwd", "DEF")
        library.define(SCHEMA)
        library.impl("fwd", _fwd, "CPU")
        _registered.append(library)
    modules = {name: ModuleType(name) for name in _MODULES}
    modules["fa3_fwd"].__path__ = []
    modules["fa3_fwd"]._C = modules["fa3_fwd._C"]
    modules["fa3_fwd_config"].CONFIG = CONFIG
    modules["fa3_fwd_interface"].fa3_fwd_cuda = torch.ops.fa3_fwd
    sys.modules.update(modules)


def uninstall() -> None:
    """Take the modules out again; the op stays, since torch keeps what has once been registered."""
    for name in _MODULES:
        sys.modules.pop(name, None)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


@dataclass(frozen=True)
class _Rows:
    """Sample b's rows: from row start[b] of `flat` [rows,H,D] on, `used[b]` of them; memory ends at `limit[b]`."""

    flat: torch.Tensor
    start: list[int]
    used: list[int]
    limit: list[int]


def _fwd(
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    beyond = (k_new, v_new, q_v, cu_seqlens_k_new, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary)
    if any(given is not None for given in (*beyond, scheduler_metadata)):
        raise NotImplementedError("emulator: appending, rotary, q_v and scheduler metadata are not emulated")
    fp8 = _check_tensors(q, k, v)
    device = q.device
    _check_int32("cu_seqlens_q", cu_seqlens_q, device, "torch.int32")
    _check_int32("cu_seqlens_k", cu_seqlens_k, device, "torch.int32")
    _require(
        cu_seqlens_q is None or max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
    )
    _require(
        cu_seqlens_k is None or max_seqlen_k is not None, "max_seqlen_k must be provided if cu_seqlens_k is provided"
    )
    _require(
        cu_seqlens_k is None or page_table is None, "If cu_seqlens_k is passed in, then page table is not supported"
    )
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    queries = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    heads, width = q.shape[-2:]
    kv_heads, value_width = k.shape[-2], v.shape[-1]
    _require(width <= 256, "FlashAttention forward only supports head dimension at most 256")
    _require(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    if value_width != width:
        _require(
            (128 < width <= 192 and 96 < value_width <= 128) or (width <= 64 and value_width <= 512),
            "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in "
            "(96, 128], or (Q/K <= 64 and V <= 512).",
        )
        _require(value_width <= 256 or not fp8, "HeaddimV > 256 requires fp16 and bf16 data type")
    _require(q.dtype != torch.float16, "This flash attention build does not support FP16.")
    aligned = 16 if fp8 else 8
    _require(width % aligned == 0, f"head_size should be a multiple of {aligned}")
    _require(value_width % aligned == 0, f"head_size_v should be a multiple of {aligned}")
    _require(num_splits <= 256, "num_splits > 256 not supported")
    for name, given in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        _check_int32(name, given, device, "int32")
        _require(given is None or given.shape == (batch,), f"{name} must have shape ({batch},)")
    for name, given in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        _require(given is None or given.device == device, f"{name} must be on CUDA")
        _require(given is None or given.shape == (batch, kv_heads), f"{name} must have shape ({batch}, {kv_heads})")
        _require(given is None or given.dtype == torch.float32, f"{name}: expected scalar type Float")

    keys = _key_count(k, cu_seqlens_k, max_seqlen_k, page_table)
    left = -1 if window_size_left >= keys - 1 else window_size_left
    right = -1 if window_size_right >= queries - 1 else window_size_right
    right = 0 if is_causal else right
    causal = left < 0 and right == 0 and attention_chunk == 0
    local = (left >= 0 or right >= 0 or attention_chunk >= 1) and not causal
    _require(not local, "This flash attention build does not support local attention.")
    tile = _tile(width, fp8, causal)
    if page_table is not None:
        _check_pages(page_table, device, batch, k.shape[1], queries * (heads // kv_heads), tile)
    else:
        keyed = k.shape[0] if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
        _require(batch == keyed, "batch_size must be equal to batch_size_k")
    _check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)

    out = _output(q, out, value_width, fp8)
    rows = out if out.dim() == 3 else out.flatten(0, 1)
    lse_shape = (heads, q.shape[0]) if q.dim() == 3 else (batch, heads, queries)
    lse = torch.full(lse_shape, float("nan"), dtype=torch.float32)
    nothing = torch.empty(0, dtype=torch.float32)
    if q.numel() == 0:
        return out, lse, nothing, nothing
    if k.shape[0] * (1 if cu_seqlens_k is not None else k.shape[1]) == 0:
        return out.zero_(), lse.fill_(float("inf")), nothing, nothing
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    asked = _rows(q, cu_seqlens_q, seqused_q)
    for b in range(batch):
        kept, k_rows, v_rows = _keys_of(b, k, v, cu_seqlens_k, seqused_k, page_table, tile[1])
        first, count = asked.start[b], min(asked.used[b], queries)  # tiles past max_seqlen_q are never launched
        q_rows = asked.flat[first : first + count].double() * _descale(q_descale, b, heads)
        k_rows = k_rows.double() * _descale(k_descale, b, kv_heads)
        v_rows = v_rows.double() * _descale(v_descale, b, kv_heads)
        shift = kept - asked.used[b] if causal else None
        answer, row_lse = _attend(q_rows, k_rows, v_rows, kept, shift, scale, softcap)
        if q.dim() == 3:
            rows[first : first + count] = answer.to(out.dtype)
            lse[:, first : first + count] = row_lse.float()
        else:
            out[b, :count] = answer.to(out.dtype)
            lse[b, :, :count] = row_lse.float()
    return out, lse, nothing, nothing


def _attend(q, k, v, kept, shift, scale, softcap):
    """q [Sq,H,D], k and v [rows >= kept,Hk,D*] in float64; key j is seen by row i iff j < kept and j <= i + shift."""
    group = q.shape[1] // k.shape[1]
    seen_k, tail_v = k[:kept].repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, seen_k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if shift is not None:
        hidden = torch.arange(kept) > torch.arange(q.shape[0]).unsqueeze(1) + shift
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if kept else scores.new_full(scores.shape[:2], float("-inf"))
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    weights = torch.nn.functional.pad(weights, (0, tail_v.shape[0] - kept))
    answer = torch.einsum("hqk,khd->qhd", weights, tail_v)
    return answer, lse


def _check_tensors(q, k, v):
    fp8 = q.dtype == torch.float8_e4m3fn
    _require(
        q.dtype in (torch.float16, torch.bfloat16) or fp8,
        "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type",
    )
    _require(k.dtype == q.dtype, "query and key must have the same dtype")
    _require(v.dtype == q.dtype, "query and value must have the same dtype")
    for tensor in (q, k, v):
        _require(tensor.device == q.device, "k must be on CUDA")
        _require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    return fp8


def _check_int32(name, given, device, dtype):
    if given is None:
        return
    _require(given.device == device, f"{name} must be on CUDA")
    _require(given.dtype == torch.int32, f"{name} must have dtype {dtype}")
    _require(given.is_contiguous(), f"{name} must be contiguous")


def _check_shapes(q, k, v, cu_q, cu_k):
    _require(q.dim() == (4 if cu_q is None else 3), "q must have shape (batch_size, seqlen_q, num_heads, head_size)")
    _require(k.dim() == v.dim() == (4 if cu_k is None else 3), "k must have shape (batch_size_k, seqlen_k, ...)")
    _require(k.shape[:-1] == v.shape[:-1], "v must have shape (batch_size_k, seqlen_k, num_heads_k, head_size_v)")
    _require(k.shape[-1] == q.shape[-1], "k must have shape (batch_size_k, seqlen_k, num_heads_k, head_size)")


def _check_pages(table, device, batch, page_size, query_rows, tile):
    _require(table.device == device, "page_table must be on CUDA")
    _require(table.dtype == torch.int32, "page_table must have dtype torch.int32")
    _require(table.stride(-1) == 1, "page_table must have contiguous last dimension")
    _require(table.shape[0] == batch, "batch_size must be equal to batch_size_k")
    by_tma = page_size % tile[1] == 0 and query_rows > tile[0]
    _require(by_tma, "This flash attention build does not support paged KV.")


def _tile(width, fp8, causal):
    """The sm90 kernel's (query rows, keys) of a tile, which decide how far V is read and whether TMA reads pages."""
    if fp8:
        by_width = {64: (192, 160), 96: (192, 128), 128: (128, 224), 192: (128, 160), 256: (128, 128)}
    else:
        by_width = {
            64: (192, 128 if causal else 192), 96: (192, 144), 128: (128, 128 if causal else 176), 192: (128, 112),
            256: (128, 80),
        }  # fmt: skip
    return by_width[min(size for size in by_width if size >= width)]


def _key_count(k, cu_k, max_k, table):
    if cu_k is not None:
        return max_k
    return k.shape[1] if table is None else table.shape[1] * k.shape[1]


def _output(q, out, value_width, fp8):
    dtype = torch.bfloat16 if fp8 else q.dtype
    shape = (*q.shape[:-1], value_width)
    if out is None:
        return torch.full(shape, float("nan"), dtype=dtype)
    _require(
        out.dtype == dtype,
        "For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, output must have dtype BF16",
    )
    _require(out.device == q.device, "out must be on CUDA")
    _require(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
    _require(out.shape == shape, f"out must have shape {shape}")
    return out


def _rows(tensor, cu, used):
    if cu is None:
        batch, length = tensor.shape[:2]
        start = [b * length for b in range(batch)]
        count, flat = [length] * batch, tensor.flatten(0, 1)
        limit = [first + length for first in start]
    else:
        bounds = cu.tolist()
        start, flat = bounds[:-1], tensor
        count = [last - first for first, last in pairwise(bounds)]
        limit = [tensor.shape[0]] * len(start)  # a tile reads on into the next document
    return _Rows(flat, start, count if used is None else used.tolist(), limit)


def _keys_of(b, k, v, cu, used, table, tile):
    """Keys that sample b keeps, its K rows, and its V rows to the end of the last tile."""
    if table is not None:
        entries = table[b].tolist()
        kept = len(entries) * k.shape[1] if used is None else int(used[b])
        pages = entries[: -(-kept // k.shape[1])]
        _require(all(0 <= page < k.shape[0] for page in pages), "emulator: a page outside the pool would be read")
        index = torch.tensor(pages, dtype=torch.int64)
        keys, values = (pool.index_select(0, index).flatten(0, 1) for pool in (k, v))
        return kept, keys[:kept], values[: _tail(kept, tile, values.shape[0])]
    keys, values = _rows(k, cu, used), _rows(v, cu, used)
    first, kept = keys.start[b], keys.used[b]
    stop = first + _tail(kept, tile, keys.limit[b] - first)
    return kept, keys.flat[first : first + kept], values.flat[first:stop]


def _tail(kept, tile, available):
    return min(-(-kept // tile) * tile, available) if TAIL_POISON else kept


def _descale(given, b, heads):
    """[heads,1]: a factor a KV head, which its query heads share; 1.0 where none is given."""
    if given is None:
        return 1.0
    return given[b].double().repeat_interleave(heads // given.shape[1]).unsqueeze(-1)
