"""What `_vllm_fa2_C::varlen_fwd` refuses, in the order in which it looks; and what it ignores without a word."""

from __future__ import annotations

import torch

from tests.emulators.xpu.stack import lint, require

Tensor = torch.Tensor
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """dtypes, then layout: rows of whole 16 bytes."""
    require(
        q.dtype in (torch.float16, torch.bfloat16, *FLOAT8),
        "VLLM Kernel XPU only supports fp16, bf16, and fp8 (e4m3/e5m2) query types",
    )
    require(v.dtype == k.dtype, "key and value must have the same dtype")
    require(k.dtype in FLOAT8 or k.dtype == q.dtype, "query and key must have the same dtype")
    require(all(t.stride(-1) == 1 for t in (q, k, v)), "Input tensor must have contiguous last dimension")
    for name, t in (("q", q), ("k", k), ("v", v)):
        size = t.shape[-1] * t.element_size()
        require(size % 16 == 0, f"{name} last dim size={t.shape[-1]} ({size} bytes) is not 16-byte aligned")
    require(q.dim() == 3, "query must be in ragged format")


def check_lengths(cu_q: Tensor, cu_k: Tensor) -> None:
    """The boundaries' form; their content is not read on the host."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        require(cu.is_contiguous(), f"{name} must be contiguous")
        require(cu.dtype == torch.int32, f"{name} must have dtype torch.int32")


def check_pages(k: Tensor, v: Tensor, table: Tensor) -> None:
    """The block table's form, and pools whose pages lie equally far apart."""
    require(table.dtype == torch.int32, "page_table must have dtype torch.int32")
    require(table.stride(-1) == 1, "page_table must have contiguous last dimension")
    steps = []
    for name, pool in (("K", k), ("V", v)):
        page, row = pool.stride(0), pool.stride(1)
        require(row > 0, f"Paged {name} sequence stride must be positive")
        require(page > 0 or name == "V", f"Paged {name} page stride must be positive")
        require(page % row == 0, f"Paged {name} page stride must be divisible by {name} sequence stride")
        steps.append(page // row)
    require(steps[0] == steps[1], "Paged K/V page strides must match in sequence-position units")


def check_devices(q: Tensor, *others: Tensor | None) -> None:
    """All on q's device: it is what a fake tensor has, where a CPU tensor cannot tell."""
    for other in others:
        require(other is None or other.device == q.device, f"a tensor on {getattr(other, 'device', '')} must be on XPU")


def check_layout(q: Tensor, k: Tensor, v: Tensor, paged: bool) -> None:
    """Rows as the vendor's own caller passes them; the host code checks none of it."""
    if not paged:
        lint(k.is_contiguous() and v.is_contiguous(), "K and V of packed documents are contiguous, or copied first")
    steps = [t.stride(d) * t.element_size() for t in (q, k, v) for d in range(t.dim() - 1) if t.shape[d] > 1]
    lint(all(step > 0 and step % 16 == 0 for step in steps), "a row that a block load takes begins at 16 bytes")


def check_ignored(
    leftpad: Tensor | None, alibi: Tensor | None, dropout: float, zero_tensors: bool, softcap: float
) -> None:
    """Arguments of the op that reach no kernel: none of the library's functions has a parameter for them."""
    lint(softcap == 0.0, f"softcap {softcap} is ignored by the native kernels")
    lint(alibi is None, "alibi_slopes are ignored by the native kernels")
    lint(leftpad is None, "leftpad_k is ignored by the native kernels")
    lint(dropout == 0.0, f"dropout {dropout} is ignored by the native kernels")
    lint(not zero_tensors, "zero_tensors is ignored by the native kernels")


def boundaries(name: str, cu: Tensor, rows: int) -> list[int]:
    """Boundaries as numbers. The kernels read where they point, so what points outside is a fault here."""
    values: list[int] = cu.tolist()
    require(len(values) >= 2, f"(emulator) {name} has no document: an empty grid cannot be launched")
    require(values == sorted(values) and values[0] >= 0, f"(emulator) {name} is not ascending from 0: {values}")
    require(values[-1] <= rows, f"(emulator) {name} ends at {values[-1]} of {rows} rows, which reads outside")
    return values


def used_rows(seqused: Tensor | None, table: Tensor, documents: int, page: int) -> list[int]:
    """Kept keys of each document over pages."""
    require(seqused is not None, "bad optional access")
    assert seqused is not None
    require(seqused.dtype == torch.int32, "(emulator) seqused_k is read as int32, whatever it is")
    require(seqused.numel() >= documents <= table.shape[0], "(emulator) fewer lengths or table rows than documents")
    values: list[int] = seqused.tolist()[:documents]
    require(
        all(0 <= value <= table.shape[1] * page for value in values), f"(emulator) seqused_k {values} exceeds table"
    )
    return values
