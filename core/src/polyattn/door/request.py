"""The facts of one call: what a backend may decide by, and nothing that needs a tensor's content."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Every structure kind a slot can take, in the order that reports use. "prefix_kv" is key padding that keeps one prefix
#: in all rows, whose slice moves no diagonal: under causal or a window its queries are "same", cut as the keys are.
KINDS = (
    "dense",
    "prefix_kv",
    "key_padding",
    "mask",
    "bias",
    "packed",
    "spans",
    "paged",
    "video_tiles",
    "block_map",
)


_FLAGS = ("causal", "lse", "out", "grad", "deterministic", "capturing", "compiling")


@dataclass(frozen=True)
class TensorFacts:
    """Shape, stride (both in elements) and dtype name of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: str) -> TensorFacts:
        """Facts of a row-major tensor of `shape`."""
        stride: list[int] = []
        step = 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), tuple(reversed(stride)), dtype)


@dataclass(frozen=True)
class VideoFacts:
    """What routing may know of video tiles.

    grid, tile            tokens of the video and of a tile, along time, height, width
    segments              half-open row ranges of the tokens beside the video: dense rows, always-kept columns
    used                  rows that hold tokens
    kept, tiles           tiles that a query tile keeps, of how many
    segment_blocks        blocks that the segments are cut into
    keep_sparse_numerics  the sparse route is wanted with all tiles kept, too
    min_seq_len           fewer rows are not worth the sparse route
    fallback              "dense": where the sparse route cannot or should not run, a dense one does; "error": none
    gate, gate_grad       a gate adds the coarse term; autograd wants its gradient
    """

    grid: tuple[int, int, int]
    tile: tuple[int, int, int]
    segments: tuple[tuple[int, int], ...]
    used: int
    kept: int
    tiles: int
    segment_blocks: int = 0
    keep_sparse_numerics: bool = False
    min_seq_len: int = 0
    fallback: str = "error"
    gate: bool = False
    gate_grad: bool = False

    @property
    def volume(self) -> int:
        """Rows of a full tile."""
        return self.tile[0] * self.tile[1] * self.tile[2]

    @property
    def too_short(self) -> str:
        """Why the sparse route is not wanted for so few rows; empty where it is."""
        short = self.used < self.min_seq_len
        return f"{self.used} rows hold tokens, fewer than min_seq_len={self.min_seq_len}" if short else ""

    @property
    def runs_dense(self) -> str:
        """Why a dense route serves the call as it stands; empty where the sparse route does."""
        if self.too_short:
            return self.too_short if self.fallback == "dense" else ""
        all_kept = self.kept == self.tiles and not self.keep_sparse_numerics
        return f"all tiles are kept ({self.tiles})" if all_kept else ""


@dataclass(frozen=True)
class StructureFacts:
    """What routing may know of a structure. A field that does not concern a kind keeps its default.

    host            lengths or boundaries are known on the host
    documents       packed: number of documents; paged: number of rows
    queries         key padding: "same" (padded query rows return 0) or "all"
    prefix          key padding: every row keeps a prefix of its keys (None: not known on the host)
    common_prefix   key padding: the one kept length that all rows share, when the host knows it
    mask_shape      mask: its shape, expanded to rank 4 with broadcast axes of size 1
    mask_dtype      mask: "bool", or the dtype name of an additive mask
    mask_grad       mask: the additive mask wants a gradient
    full            mask: the host knows that it hides nothing
    spans           packed, paged: spans are given as well
    capacity        packed: only capacities are known when routing
    query_layout    paged: "batched" [B,Sq,H,D], "packed" [T,H,D] or "padded" [B,Sq,H,D] with q_lengths
    page_size       paged: rows of a page
    same_lengths    packed: queries and keys share one set of boundaries
    video           video tiles: their layout and rules
    blocks          block map: rows of a query block and of a key block
    """

    host: bool = True
    documents: int | None = None
    queries: str | None = None
    prefix: bool | None = None
    common_prefix: int | None = None
    mask_shape: tuple[int, ...] | None = None
    mask_dtype: str | None = None
    mask_grad: bool = False
    full: bool = False
    spans: bool = False
    capacity: bool = False
    query_layout: str | None = None
    page_size: int | None = None
    same_lengths: bool = True
    video: VideoFacts | None = None
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True)
class Request:
    """The frozen facts of one attention call.

    q, k, v           facts of the tensors as the slot will get them: [B,S,H,D], packed [T,H,D], paged pools
    device            "cpu", "cuda:1", ...
    structure_kind    one of `KINDS`
    window            (left, right) inclusive counts beside the bottom-right diagonal, None unbounded; None: no window.
                      With causal the right side is 0
    scale             the factor on q.k, already resolved (never None)
    softcap           0.0 means none
    out               the caller gave an output buffer
    grad              autograd needs this call
    autocast_dtype    the dtype name that autocast imposes, or None
    quant             "fp8", "int8", "mxfp8", "mxfp4" or None
    options           typed options of this platform (see `Options`)
    capturing         the device's stream is being captured into a graph
    compiling         the call is made by a compiled graph (torch.compile)
    """

    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    device: str = "cpu"
    structure_kind: str = "dense"
    structure_facts: StructureFacts = StructureFacts()
    causal: bool = False
    scale: float = 1.0
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    lse: bool = False
    out: bool = False
    grad: bool = False
    autocast_dtype: str | None = None
    deterministic: bool = False
    quant: str | None = None
    options: tuple[Any, ...] = ()
    capturing: bool = False
    compiling: bool = False

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def dtype(self) -> str:
        """The dtype the slot computes in."""
        return self.autocast_dtype or self.q.dtype

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[-1]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready form, for reports."""
        facts = asdict(self)
        facts["options"] = [repr(option) for option in self.options]
        return facts

    def __str__(self) -> str:
        """One line: shapes, dtype, device and whatever is not the default."""
        q, k, v = (list(t.shape) for t in (self.q, self.k, self.v))
        words = [f"q{q} k{k} v{v} {self.dtype} on {self.device}", self.structure_kind]
        if self.structure_facts.documents is not None:
            words.append(f"{self.structure_facts.documents} documents")
        words += [name for name in _FLAGS if getattr(self, name)]
        words += [f"{name}={value}" for name in ("window", "softcap", "quant") if (value := getattr(self, name))]
        return ", ".join(words)
