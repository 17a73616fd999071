"""What npu_fusion_attention refuses: torch_npu's own checks, then those of the op below it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.emulators.npu import layouts, sparse
from tests.emulators.npu.stack import current, lint, require, require_op

LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND")
MILLION = 2**20
#: Documents of one call that every sentence of the vendor's allows.
DOCUMENTS = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Shape(NamedTuple):
    """Facts of a call that passed: sizes, the layout in capitals and the documents as (Sq, Skv)."""

    layout: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    v_dim: int
    documents: list[tuple[int, int]] | None

    @property
    def op(self) -> str:
        """The op's name in errors."""
        return "aclnnFlashAttentionScore" if self.documents is None else "aclnnFlashAttentionVarLenScore"


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]) -> Shape:
    """The facts of an allowed call; RuntimeError for any other. `asked` has every argument by name."""
    _check_arguments(q, k, v, asked)
    layout = asked["input_layout"].upper()
    op = "aclnnFlashAttentionVarLenScore" if layout == "TND" else "aclnnFlashAttentionScore"
    kv_heads = _check_tensors(op, layout, q, k, v, asked["head_num"])
    heads = asked["head_num"]
    q4, k4, v4 = (layouts.bnsd(layout, t, n) for t, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    require_op(q4.shape[0] == k4.shape[0] == v4.shape[0], op, "batch sizes of query, key and value differ", 161002)
    require_op(k4.shape[:3] == v4.shape[:3], op, "key and value differ in more than the head dim", 161002)
    dim, v_dim, limit = q4.shape[3], v4.shape[3], current().kernels.fusion_head_dim
    require_op(0 < dim == k4.shape[3] and 0 < v_dim <= dim, op, f"head dims {dim}, {k4.shape[3]}, {v_dim}", 161002)
    require_op(dim <= limit, op, f"head dim {dim} > {limit}")
    longest = max(q4.shape[2], k4.shape[2])
    require_op(q4.shape[0] <= 2 * MILLION, op, f"B {q4.shape[0]} > 2M")
    require_op(longest <= MILLION, op, f"{'T' if layout == 'TND' else 'S'} {longest} > 1M")
    documents = _documents(op, asked, q4.shape[2], k4.shape[2]) if layout == "TND" else None
    known = Shape(layout, q4.shape[0], heads, kv_heads, q4.shape[2], k4.shape[2], dim, v_dim, documents)
    _check_mask(known, asked)
    _check_bias(known, asked, q)
    return known


def _check_arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]) -> None:
    require(asked["head_num"] > 0, f"head_num must be greater than 0, got {asked['head_num']}")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require(tensor.dim() in (3, 4), f"{name} must be 3-D or 4-D, got {tensor.dim()}-D")
    require(0 < asked["keep_prob"] <= 1, f"keep_prob must be in (0, 1], got {asked['keep_prob']}")
    layout, mode, softmax = asked["input_layout"], asked["sparse_mode"], asked["softmax_layout"]
    require(layout != "", "input_layout is empty")
    require(softmax in ("", "TND"), f"softmax_layout {softmax!r} is not 'TND'")
    require(softmax == "" or layout == "TND", "softmax_layout is for input_layout TND only")
    if layout == "TND":
        require(mode in (0, 1, 2, 3, 4, 6, 7, 8), f"sparse_mode {mode} is not supported in TND")
        ends = [asked[name] or () for name in ("actual_seq_qlen", "actual_seq_kvlen")]
        require(0 < len(ends[0]) == len(ends[1]), "TND takes actual_seq_qlen and actual_seq_kvlen of equal length")
    else:
        require(0 <= mode <= 6, f"sparse_mode {mode} is not in 0..6")
    require(layout.upper() in LAYOUTS, f"input_layout {layout} is none of {LAYOUTS}")


def _check_tensors(op: str, layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> int:
    """The number of key and value heads."""
    require_op(q.dtype == k.dtype == v.dtype, op, f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}", 161002)
    require_op(q.dtype in DTYPES, op, f"{q.dtype} is none of float16, bfloat16, float32", 161002)
    fits = {t.dim() for t in (q, k, v)} == {layouts.RANK[layout]}
    require_op(fits, op, f"unsupported layout: {layout} and tensors of {q.dim()}, {k.dim()} and {v.dim()} axes")
    if layout in layouts.HEAD_AXIS:
        axis = layouts.HEAD_AXIS[layout]
        require_op(q.shape[axis] == heads, op, f"head_num {heads} and a query of {q.shape[axis]} heads", 161002)
        kv_heads = k.shape[axis]
    else:
        require_op(q.shape[2] % heads == 0, op, f"H {q.shape[2]} is no multiple of head_num {heads}", 161002)
        dim = q.shape[2] // heads
        require_op(dim > 0 and k.shape[2] % dim == 0 and k.shape[2] > 0, op, f"key's H {k.shape[2]}, D {dim}", 161002)
        kv_heads = k.shape[2] // dim
        require_op(v.shape[2] % kv_heads == 0, op, f"value's H {v.shape[2]} and {kv_heads} heads", 161002)
    require_op(kv_heads > 0 and heads % kv_heads == 0, op, f"{heads} query heads and {kv_heads} key heads", 161002)
    require_op(heads <= 256, op, f"{heads} heads > 256")
    return kv_heads


def _documents(op: str, asked: dict[str, Any], rows: int, keys: int) -> list[tuple[int, int]]:
    q_lengths, k_lengths = (layouts.lengths_of(asked[name]) for name in ("actual_seq_qlen", "actual_seq_kvlen"))
    require_op(rows >= sum(q_lengths), op, f"Query T {rows} need larger than {sum(q_lengths)}")
    require_op(keys >= sum(k_lengths), op, f"Key T {keys} need larger than {sum(k_lengths)}")
    documents = list(zip(q_lengths, k_lengths, strict=True))
    lint(len(documents) <= DOCUMENTS, f"TND: {len(documents)} documents, of which not all documents say they are taken")
    lint(all(k for q, k in documents if q), "TND: a document of queries without keys has no defined result")
    return documents


def _check_mask(known: Shape, asked: dict[str, Any]) -> None:
    mode, mask, op = asked["sparse_mode"], asked["atten_mask"], known.op
    if mask is None:
        ignored = mode != 0 or asked["pre_tockens"] < known.queries or asked["next_tockens"] < known.keys
        lint(not ignored, f"without atten_mask, sparse_mode {mode} and pre/next_tockens are ignored: full attention")
        return
    packed = known.documents is not None
    sparse.check_mask(op, mode, mask, (known.batch, known.heads, known.queries, known.keys), packed)
    band = sparse.Band(asked["pre_tockens"], asked["next_tockens"])
    lengths = known.documents if packed else [(known.queries, known.keys)] * known.batch
    if mode in (5, 6):
        _check_prefix(op, asked["prefix"], lengths)
    if packed:
        sparse.check_documents(op, mode, band, lengths)
        whole = (sum(q for q, _ in lengths), sum(k for _, k in lengths))
        longest = (max(q for q, _ in lengths), max(k for _, k in lengths))
        fits = mode not in (0, 1) or tuple(mask.shape) in (whole, longest)
        require_op(fits, op, f"TND: atten_mask {tuple(mask.shape)} is neither {longest} nor {whole}")
        blind = mode in (0, 1) and bool(mask.bool().all(-1).any())
        lint(not blind, "TND: a mask with a row that sees nothing is not supported")
    elif mode in (0, 4):
        sparse.check_band(op, band, known.keys - known.queries if mode == 4 else 0, known.queries, known.keys)


def _check_prefix(op: str, prefix: list[int] | None, lengths: list[tuple[int, int]]) -> None:
    fits = prefix is not None and len(prefix) == len(lengths) <= 32
    require_op(fits, op, f"prefix {prefix} is not one number for each of {len(lengths)}")
    for number, (queries, keys) in zip(prefix or (), lengths, strict=True):
        require_op(max(keys - queries, 0) <= number <= keys, op, f"prefix {number} and {queries} x {keys}")


def _check_bias(known: Shape, asked: dict[str, Any], q: torch.Tensor) -> None:
    pse, sink, op = asked["pse"], asked["sink"], known.op
    if pse is not None and asked.get("pse_type", 1) in (0, 1):
        require_op(pse.dtype == q.dtype, op, f"pse is {pse.dtype}, query {q.dtype}", 161002)
        require_op(known.documents is None, op, "(emulator) pse in TND is not emulated")
        b, n, s, t = known.batch, known.heads, known.queries, known.keys
        shapes = [(b, n, s, t), (b, n, 1, t), (1, n, s, t)]
        require_op(tuple(pse.shape) in shapes, op, f"pse {tuple(pse.shape)} is none of {shapes}")
        lint(not bool(pse.isneginf().any()), "pse with -inf gives NaN")
    if sink is not None:
        require(current().kernels.sink, "this CANN does not support sink")
        fits = tuple(sink.shape) == (known.heads,) and sink.dtype == torch.float32
        require_op(fits, op, f"sink must be float32 [{known.heads}]", 161002)
