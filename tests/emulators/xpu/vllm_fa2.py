"""`torch.ops._vllm_fa2_C.varlen_fwd` on CPU tensors, under the real Python package `vllm_xpu_kernels`.

    pip install --no-deps vllm-xpu-kernels==0.1.16.2

Which of its paths runs, what is compiled for it, and what it writes follow the release's libraries and sources. Three
things surprise: a window without pages has no kernel, so that the package falls back to its slow reference; a document
without queries over pages is taken by the decode kernel, which writes a row of its neighbour; and a window's LSE is
refused, in words that cause no fallback.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch

from tests.emulators.xpu import vllm_checks as checks
from tests.emulators.xpu.releases import SCHEMAS, Library
from tests.emulators.xpu.stack import current, require
from tests.emulators.xpu.vllm_kernels import NAN, Keys, Scores, decode, prefill

VERSIONS = {"vllm-xpu-kernels": "0.1.16.2"}
#: "prefill 64 fffff", "decode q8_h64_p64_fff" -> how often that kernel ran.
counts: Counter[str] = Counter()
_library: list[torch.library.Library] = []
Tensor = torch.Tensor


def install() -> None:
    """Registers the op for CPU tensors and imports the real package over it; once a process, for good."""
    extension = "vllm_xpu_kernels._vllm_fa2_C"
    sys.modules[extension] = types.ModuleType(extension)
    if not _library:
        library = torch.library.Library("_vllm_fa2_C", "DEF")
        library.define(SCHEMAS[current().kernels])
        library.impl("varlen_fwd", varlen_fwd, "CPU")
        _library.append(library)
    package = importlib.import_module("vllm_xpu_kernels.flash_attn_interface")
    assert package.FA2_AVAILABLE, package.FA2_UNAVAILABLE_REASON


def varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
               max_seqlen_q, max_seqlen_k, p_dropout, q_scale, k_scale, v_scale, softmax_scale, softmax_sink,
               zero_tensors, is_causal, window_size_left, window_size_right, softcap, return_softmax, gen, num_splits,
               mix_batch, splits_per_seq, work_list) -> list[Tensor]:  # fmt: skip
    """q [T,H,D]; k, v [Tk,Hk,D] or pages [N,page,Hk,D] -> out [T,H,D], lse [H,T] (nothing where it is not asked)."""
    paged = block_table is not None
    checks.check_tensors(q, k, v)
    if paged:
        checks.check_pages(k, v, block_table)
    checks.check_lengths(cu_seqlens_q, cu_seqlens_k)
    checks.check_layout(q, k, v, paged)
    library = current().library
    require(library is not None, "Only XE2/XE3 cutlass kernel is supported currently.")
    assert library is not None
    require(library.fp8_query or q.dtype not in checks.FLOAT8, "Unsupported Q/KV dtype combination for the kernel")
    run = _Run(library, q, k, v, block_table, is_causal, (window_size_left, window_size_right), max_seqlen_k,
               softmax_scale, softmax_sink, return_softmax)  # fmt: skip
    run.ignored = lambda: checks.check_ignored(leftpad_k, alibi_slopes, p_dropout, zero_tensors, softcap)
    run.read_fp8(k_scale, v_scale)
    run.out = torch.full(q.shape, NAN, dtype=q.dtype) if out is None else out
    lengths = seqused_k if paged else cu_seqlens_k
    if not paged or (not mix_batch and max_seqlen_q > 1):
        run.prefilled(cu_seqlens_q, lengths, max_seqlen_q, lambda rows: True)
    elif max_seqlen_q > 1:
        run.prefilled(cu_seqlens_q, lengths, max_seqlen_q, lambda rows: rows > 1)
        run.decoded(cu_seqlens_q, lengths, lambda rows: rows <= 1)
    else:
        run.decoded(cu_seqlens_q, lengths, lambda rows: True)
    return [run.out, run.lse if return_softmax else torch.empty(0)]


class _Run:
    """One call: its tensors, and what it writes."""

    out: Tensor
    ignored: Callable[[], None]

    def __init__(self, library: Library, q, k, v, table, causal, window, max_k, scale, sink, need_lse) -> None:
        require(k.shape[-2] > 0 and q.shape[1] % k.shape[-2] == 0, "(emulator) KV heads do not divide query heads")
        self.library, self.q, self.k, self.v, self.table = library, q, k, v, table
        self.max_k, self.need_lse, self.paged = max_k, need_lse, table is not None
        self.page = k.shape[1] if self.paged else 0
        self.scores = Scores(scale, causal, *window, tile=16 if self.page % 32 and self.paged else 32, sink=sink)
        self.lse = torch.full((q.shape[1], q.shape[0]), NAN, dtype=torch.float32)

    def read_fp8(self, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
        """Keys and values of float8 by their one number each."""
        if self.k.dtype not in checks.FLOAT8:
            return
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            require(scale is not None, "FP8 KV cache requires both k_scale and v_scale tensors to be provided.")
            single = scale.dtype == torch.float32 and all(
                scale.stride(d) == 0 or n == 1 for d, n in enumerate(scale.shape)
            )
            require(single, f"FP8 KV {name} must be a float32 tensor with a single element.")
        self.k, self.v = (t.float() * s.flatten()[0] for t, s in ((self.k, k_scale), (self.v, v_scale)))

    def prefilled(self, cu_q: Tensor, lengths: Tensor, max_q: int, takes: Callable[[int], bool]) -> None:
        """The prefill kernel over the documents whose number of rows `takes` accepts."""
        self._choose_prefill()
        require(self.v.shape[-1] == self.q.shape[-1], "(emulator) prefill reads V with the head dim of K")
        require(self.q.shape[0] > 0 and max_q > 0, "(emulator) no query rows: an empty grid cannot be launched")
        scores = self.scores.within(self.max_k)
        for index, (start, stop) in enumerate(self._documents(cu_q)):
            if not takes(stop - start):
                continue
            keys = self._keys(index, lengths, scores.tile)
            out, lse = prefill(self.q[start:stop], keys, scores)
            written = slice(start, min(stop, start + max_q))  # tiles past the stated longest document are not launched
            self._write(written, out[: written.stop - start], lse[:, : written.stop - start])

    def decoded(self, cu_q: Tensor, lengths: Tensor, takes: Callable[[int], bool]) -> None:
        """The decode kernel: one row a document, whether the document has it or not."""
        self._choose_decode()
        require(self.q.shape[0] > 0, "(emulator) no query rows: an empty grid cannot be launched")
        documents = self._documents(cu_q)
        for index, (start, stop) in enumerate(documents):
            if takes(stop - start) and stop > start:
                out, lse = decode(self.q[start : start + 1], self._keys(index, lengths, self._decode_tile), self.scores)
                self._write(slice(start, start + 1), out, lse)
        for start, stop in documents:
            if takes(stop - start) and stop == start:
                require(start < self.q.shape[0], "(emulator) decode writes a row behind the output")
                self.out[start], self.lse[:, start] = NAN, NAN  # its own row or its neighbour's: whoever comes last

    def _choose_prefill(self) -> None:
        dim = self.q.shape[-1]
        require(dim <= 512, "FMHA forward only supports head dimension at most 512")
        unserved = self.scores.local or self.scores.sink is not None or (self.paged and not self.library.paged_lse)
        if self.need_lse and unserved:
            raise RuntimeError("softmax_lse output is only supported when is_local=false and is_sink=false")
        self._check_page("chunk_prefill: unsupported block_size=")
        flags = (self.paged, self.scores.causal and not self.scores.local, self.scores.local,
                 self.scores.sink is not None, self.need_lse)  # fmt: skip
        variant, head = "".join("ft"[flag] for flag in flags), min(d for d in self.library.prefill if d >= dim)
        if variant not in self.library.prefill[head]:
            raise RuntimeError(f"Chunk prefill kernel tuple not compiled for this configuration. {head},{variant}")
        self.ignored()  # by a kernel; the package's own reference, which it falls back to, honours softcap
        counts[f"prefill {head} {variant}"] += 1

    def _choose_decode(self) -> None:
        dim, group = self.q.shape[-1], self.q.shape[1] // self.k.shape[-2]
        require(dim <= 576, "FMHA forward only supports head dimension at most 576")
        require(dim <= 512 or group <= 8, f"paged decode: num_heads_q/num_heads_kv={group} is not supported")
        self._check_page("Unsupported page size for fmha: ")
        head = min(d for d in (64, 96, 128, 192, 256, 512, 576) if d >= dim)
        flags = "f" + "ft"[self.scores.local] + "ft"[self.scores.sink is not None]
        name = f"q{8 if group <= 8 else 16}_h{head}_p{self._decode_tile}_{flags}"
        if name not in self.library.decode:
            raise RuntimeError(f"Paged decode kernel tuple not compiled for this configuration. {name}")
        self.ignored()
        counts[f"decode {name}"] += 1

    @property
    def _decode_tile(self) -> int:
        return 64 if self.page % 64 == 0 else 32 if self.page == 32 else 16

    def _check_page(self, words: str) -> None:
        if self.paged:
            step, page = self.library.page_step, self.page
            require(page > 0 and (page % step == 0 or (step == 64 and page in (16, 32))), f"{words}{page}")

    def _documents(self, cu_q: Tensor) -> list[tuple[int, int]]:
        ends = checks.boundaries("cu_seqlens_q", cu_q, self.q.shape[0])
        return list(pairwise(ends))

    def _keys(self, index: int, lengths: Tensor, tile: int) -> Keys:
        if not self.paged:
            ends = checks.boundaries("cu_seqlens_k", lengths, self.k.shape[0])
            rows = slice(ends[index], ends[index + 1])  # behind them a block load gives zeros
            return Keys(self.k[rows], self.v[rows], self.v[:0])
        used = checks.used_rows(lengths, self.table, index + 1, self.page)[index]
        pages = self.table[index, : -(-used // self.page)].tolist()
        require(all(0 <= page < self.k.shape[0] for page in pages), "(emulator) block_table: a page outside the pool")
        k, v = (pool[pages].flatten(0, 1) for pool in (self.k, self.v))
        last = min(-(-used // tile) * tile, v.shape[0])
        return Keys(k[:used], v[:used], v[used:last])

    def _write(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        self.out[rows] = out.to(self.out.dtype)
        self.lse[:, rows] = lse.float()
