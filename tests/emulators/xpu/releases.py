"""Facts of versions as rows: what each release of Intel's kernels was compiled with, and which devices they run on.

Read off the wheels' own libraries (their kernels' names, exported signatures and messages) unless a row says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """One family's kernels in a release.

    prefill        head dim it is padded to -> compiled variants; five flags each: paged, causal, local, sink, lse
    decode         compiled ones: queries of a KV head, head dim, tile of pages; causal, local, sink
    page_step      pages are multiples of this; 64 stands for 16, 32 and multiples of 64
    paged_lse      whether prefill over pages gives an LSE
    fp8_query      whether queries may be float8
    """

    prefill: dict[int, frozenset[str]]
    decode: frozenset[str]
    page_step: int
    paged_lse: bool
    fp8_query: bool


def _variants(**names: str) -> dict[int, frozenset[str]]:
    return {int(size.removeprefix("head")): frozenset(text.split()) for size, text in names.items()}


#: Decode's kernels, the same in both libraries: queries of a KV head, head dim, tile of pages -> flags.
_DECODE_FLAGS = {
    "q16_h128_p16": "fff ftf", "q16_h128_p64": "fff ftf", "q16_h256_p64": "fff", "q16_h64_p16": "fff tff",
    "q16_h64_p32": "fff tff", "q16_h64_p64": "fff tff", "q8_h128_p16": "fff ftf tff", "q8_h128_p32": "fff tff",
    "q8_h128_p64": "fff fft ftf tff", "q8_h192_p16": "tff", "q8_h192_p32": "tff", "q8_h192_p64": "fff tff",
    "q8_h256_p32": "ftf", "q8_h256_p64": "fff ftf", "q8_h512_p32": "fff", "q8_h512_p64": "fff",
    "q8_h576_p64": "fff", "q8_h64_p16": "fff", "q8_h64_p64": "fff fft ftf ftt", "q8_h96_p16": "ftf",
    "q8_h96_p64": "fff ftf",
}  # fmt: skip
_DECODE = frozenset(f"{kernel}_{flags}" for kernel, text in _DECODE_FLAGS.items() for flags in text.split())

_XE2 = Library(
    prefill=_variants(
        head64="fffff ftfff tffff tffft tfftf tftff tfttf ttfff ttfft ttftf tttff ttttf",
        head80="fffff",
        head96="fffff tfftf ttfff ttfft",
        head128="fffff fffft ftfff ftfft tffff tffft tfftf tftff tfttf ttfff ttfft ttftf tttff ttttf",
        head192="fffft ftfff ftfft ttfff ttfft",
        head256="fffff fffft ftfff ftfft tfftf ttfff ttfft",
        head512="ttfff ttfft",
    ),
    decode=_DECODE, page_step=16, paged_lse=True, fp8_query=False,
)  # fmt: skip

_XE3 = Library(
    prefill=_variants(
        head64="fffff ftfff tffff tfftf tftff tfttf ttfff ttftf tttff ttttf",
        head96="fffff tfftf ttfff",
        head128="fffff fffft ftfff ftfft tffff tfftf tftff tfttf ttfff ttftf tttff ttttf",
        head192="fffft ftfff ftfft ttfff",
        head256="fffff fffft ftfff ftfft tfftf ttfff",
        head512="ttfff",
    ),
    decode=_DECODE, page_step=64, paged_lse=False, fp8_query=True,
)  # fmt: skip

#: vllm-xpu-kernels: release -> family -> its library. A newer one is a new row.
KERNELS: dict[str, dict[str, Library]] = {"0.1.16.2": {"xe2": _XE2, "xe3": _XE3}}

#: The op's declaration in a release, as its extension registers it.
SCHEMAS = {
    "0.1.16.2": (
        "varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, "
        "int max_seqlen_k, float p_dropout, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, float softmax_scale, "
        "Tensor? softmax_sink, bool zero_tensors, bool is_causal, int window_size_left, int window_size_right, "
        "float softcap, bool return_softmax, Generator? gen, int? num_splits, bool mix_batch, "
        "Tensor? splits_per_seq, Tensor? work_list) -> Tensor[]"
    ),
}

#: Device -> the family whose library serves it ("" is none) and its version as Intel numbers it.
DEVICES: dict[str, tuple[str, tuple[int, int, int]]] = {
    "PVC": ("xe2", (12, 60, 7)),
    "BMG-G21": ("xe2", (20, 1, 4)),
    "BMG-G31": ("xe2", (20, 2, 0)),
    "LNL": ("xe2", (20, 4, 4)),
    "PTL": ("xe3", (30, 0, 4)),
    "WCL": ("xe3", (30, 3, 0)),
    "ACM": ("", (12, 55, 8)),
    "MTL": ("", (12, 70, 4)),
    "ARL": ("", (12, 74, 4)),
}


def architecture(device: str) -> str:
    """The number that SYCL gives a device, in hexadecimal: major, minor and revision packed, then a byte of zeros."""
    major, minor, revision = DEVICES[device][1]
    return f"{(major << 22 | minor << 14 | revision) << 8:#x}"


@dataclass(frozen=True)
class Torch:
    """An XPU build of torch: its fused SDPA. Its flash kernel came after 2.10."""

    flash: bool
    flash_head_dim: int = 192
    onednn_head_dim: int = 576


TORCH = {"2.8.0+xpu": Torch(flash=False), "2.11.0+xpu": Torch(flash=True), "2.14.0+xpu": Torch(flash=True)}

#: IPEX: the last release. Its wheel on PyPI has the CPU's functions alone; XPU builds came from the vendor's own index.
IPEX = ("2.8.0+cpu", "2.8.10+xpu")
