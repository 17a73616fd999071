"""Attention over pages against the reference: page sizes, layouts, masks, splits, and what must never be read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.backends import triton_paged
from polyattn.kernels.paged_attention import Pages, paged_attention
from polyattn.kernels.paged_tiles import PagedTiles
from polyattn.reference.paged import paged as reference_paged
from polyattn.reference.rule import Rule, Window
from polyattn.vendor import Capability, capabilities_of

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """What is asked. layout: "batched", "padded" or "packed" queries; `strays`: an entry of each row names no page."""

    page_size: int
    kv: tuple[int, ...]
    queries: int = 3
    q: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    layout: str = "batched"
    causal: bool = True
    window: Window | None = None
    softcap: float = 0.0
    scale: float = 0.25
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None
    strays: bool = False


CASES = {
    "page 1": Case(1, (21, 5)),
    "page 4": Case(4, (37, 5, 16)),
    "page 16": Case(16, (50, 17)),
    "page 33": Case(33, (70, 33), queries=5),
    "page 64": Case(64, (100, 64), queries=9),
    "one KV head for all": Case(16, (40,), heads=(6, 1), queries=20),
    "as many KV heads": Case(16, (40, 7), heads=(3, 3)),
    "another value dim": Case(4, (20, 9), dims=(24, 40)),
    "every key": Case(4, (20, 9), causal=False),
    "window": Case(16, (90, 40), queries=20, causal=False, window=(9, 3)),
    "one-sided window": Case(16, (90, 40), queries=20, window=(17, 0)),
    "unbounded left": Case(16, (40, 9), queries=6, causal=False, window=(None, 2)),
    "unbounded right": Case(16, (40, 9), queries=6, causal=False, window=(4, None)),
    "window wider than int32": Case(16, (40, 9), queries=6, causal=False, window=(2**40, 2**33)),
    "softcap": Case(16, (40, 9), softcap=2.0),
    "tiny scores under a softcap": Case(16, (40, 9), softcap=50.0, scale=1e-3),
    "softcap past float32": Case(16, (40, 9), softcap=1e39),
    "scale below float32": Case(16, (40, 9), scale=1e-46),
    "scale 0": Case(16, (40, 9), scale=0.0),
    "negative scale": Case(16, (40, 9), scale=-0.5),
    "more queries than keys": Case(16, (5, 9), queries=21),
    "more queries than keys, window": Case(16, (5, 9), queries=21, causal=False, window=(3, 2)),
    "no key": Case(16, (0, 9, 0)),
    "padded": Case(16, (40, 9, 3), q=(4, 0, 3), queries=6, layout="padded"),
    "padded, every key": Case(16, (40, 9, 3), q=(4, 0, 3), queries=6, layout="padded", causal=False),
    "packed": Case(16, (40, 9, 0, 30), q=(7, 0, 3, 20), layout="packed"),
    "packed, window": Case(4, (40, 30), q=(7, 20), layout="packed", causal=False, window=(5, 1)),
    "spans": Case(16, (60, 20), queries=8, spans=(((50, 58),), ((0, 5), (14, 20)))),
    "spans, padded": Case(4, (30, 20), q=(9, 2), queries=12, layout="padded", spans=(((20, 28),), ((17, 20),))),
    "spans, packed": Case(16, (60, 20), q=(9, 20), layout="packed", spans=(((50, 58),), ((0, 5), (14, 20)))),
    "spans that no query is in": Case(16, (60, 20), queries=2, spans=(((3, 9),), ())),
    "entries that name no page": Case(16, (90, 33), queries=9, strays=True),
    "entries that name no page, small pages": Case(4, (70, 33), queries=9, strays=True),
    "entries that name no page, one page a row": Case(64, (50, 33), strays=True),
}


@dataclass(frozen=True)
class Given:
    """The tensors of a case, what is asked of them, and the reference's answer."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    structure: pa.Paged
    pages: Pages
    out: torch.Tensor
    lse: torch.Tensor


def given(case: Case, dtype: torch.dtype, device: str) -> Given:
    """Tensors of a case: what nobody may read is NaN, entries past the lengths are senseless."""
    torch.manual_seed(0)
    rows, (heads, kv_heads), (dim, v_dim) = len(case.kv), case.heads, case.dims
    used = [-(-length // case.page_size) for length in case.kv]
    width = max(used) + 1
    pool = rows * width + 2
    table = torch.randperm(pool)[: rows * width].reshape(rows, width).to(torch.int32)
    k = torch.full((pool, case.page_size, kv_heads, dim), nan, dtype=dtype)
    v = torch.full((pool, case.page_size, kv_heads, v_dim), nan, dtype=dtype)
    for row, length in enumerate(case.kv):
        place = torch.arange(length)
        page, offset = table[row].long()[place // case.page_size], place % case.page_size
        k[page, offset] = torch.randn(length, kv_heads, dim).to(dtype)
        v[page, offset] = torch.randn(length, kv_heads, v_dim).to(dtype)
        table[row, used[row] :] = (-1, pool, 2**31 - 1)[row % 3]
        if case.strays and length:
            lost = (row + 1) % used[row]
            k[table[row, lost]] = v[table[row, lost]] = nan
            table[row, lost] = (-1, pool, 2**31 - 1)[row % 3]
    # three tokens more than the rows have: what lies behind the last row
    q = torch.randn(sum(case.q or ()) + 3, heads, dim) if case.layout == "packed" else None
    q = torch.randn(rows, case.queries, heads, dim) if q is None else q
    q = q.to(dtype)
    structure = pa.Paged(table, case.kv, case.q, spans=case.spans)
    rule = Rule(case.scale, case.softcap, case.causal, case.window)
    out, lse = reference_paged(q.double(), k.double(), v.double(), structure, rule)
    q, k, v, table = (tensor.to(device) for tensor in (q, k, v, table))
    kept, asked = (
        None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
        for lengths in (case.kv, case.q)
    )
    assert kept is not None
    ends = None if case.spans is None else triton_paged.visible_ends(case.spans, max(case.kv)).to(device)
    return Given(q, k, v, structure, Pages(table, kept, asked, ends), out, lse)


def attended(case: Case, tensors: Given, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's answer, into a buffer that holds NaN."""
    q, k, v = tensors.q, tensors.k, tensors.v
    arguments: dict[str, Any] = {
        "out": q.new_full((*q.shape[:-1], v.shape[-1]), nan), "pages": tensors.pages, "need_lse": True,
        "causal": case.causal and case.spans is None, "scale": case.scale, "window": case.window,
        "softcap": case.softcap,
    } | changed  # fmt: skip
    out, lse = paged_attention(q, k, v, **arguments)
    assert lse is not None
    return out, lse


def assert_equal(out: torch.Tensor, lse: torch.Tensor, tensors: Given) -> None:
    """Equal to the reference within the dtype's tolerance; rows that see nothing are 0 and -inf exactly."""
    tolerance = TOLERANCES[out.dtype]
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), tensors.out, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), tensors.lse, atol=tolerance, rtol=1e-3)
    assert out.cpu().movedim(-2, -3)[tensors.lse.isneginf()].eq(0).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_answers_as_the_reference_does(name: str, splits: int, device: str) -> None:
    tensors = given(CASES[name], torch.float32, device)
    out, lse = attended(CASES[name], tensors, tiles=PagedTiles(16, 16, 4, 2, splits))
    assert_equal(out, lse, tensors)


@pytest.mark.parametrize("name", ["page 4", "page 64", "packed", "spans", "softcap"])
def test_answers_in_every_dtype_with_the_tiles_of_the_policy(
    name: str, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        tensors = given(CASES[name], dtype, device)
        assert_equal(*attended(CASES[name], tensors), tensors)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16), (64, 64)])
@pytest.mark.parametrize("name", ["page 33", "page 64", "window", "entries that name no page"])
def test_the_answer_does_not_depend_on_how_the_work_is_cut(name: str, block_m: int, block_n: int, device: str) -> None:
    tensors = given(CASES[name], torch.float32, device)
    assert_equal(*attended(CASES[name], tensors, tiles=PagedTiles(block_m, block_n, 4, 2, 2)), tensors)


def test_more_packed_rows_than_one_scan_of_their_lengths_takes(device: str) -> None:
    case = Case(1, (2,) * 132, q=(0, 1) * 66, layout="packed", heads=(1, 1))
    tensors = given(case, torch.float32, device)
    assert_equal(*attended(case, tensors, tiles=PagedTiles(16, 16, 4, 2, 1)), tensors)


def test_any_strides_of_any_tensor(device: str) -> None:
    case = CASES["page 4"]
    tensors = given(case, torch.float32, device)
    apart = tensors.k.new_full((tensors.k.shape[0], 3, *tensors.k.shape[1:]), nan)
    apart[:, 1] = tensors.k
    strange = Given(
        tensors.q.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0), apart[:, 1],
        tensors.v.transpose(0, 3).contiguous().transpose(0, 3), tensors.structure,
        Pages(tensors.pages.block_table.t().contiguous().t(), tensors.pages.kv_lengths.repeat_interleave(2)[::2]),
        tensors.out, tensors.lse,
    )  # fmt: skip
    buffer = tensors.q.new_full((16, 4, 3, 3), nan).permute(3, 2, 1, 0)
    out, lse = attended(case, strange, out=buffer, tiles=PagedTiles(16, 16, 4, 2, 2))
    assert out is buffer
    assert_equal(out, lse, tensors)


def test_lengths_in_the_tensors_count_when_the_kernel_runs(device: str) -> None:
    """As in the replay of a graph: the same tensors, other content."""
    case = CASES["padded"]
    tensors = given(case, torch.float32, device)
    attended(case, tensors)
    assert tensors.pages.q_lengths is not None
    tensors.pages.kv_lengths.copy_(torch.tensor([11, 9, 0]))
    tensors.pages.q_lengths.copy_(torch.tensor([2, 5, 1]))
    table, *pools = (tensor.cpu() for tensor in (tensors.pages.block_table, tensors.q, tensors.k, tensors.v))
    shorter = pa.Paged(table, [11, 9, 0], [2, 5, 1])
    rule = Rule(case.scale, 0.0, True, None)
    out, lse = reference_paged(*(tensor.double() for tensor in pools), shorter, rule)  # type: ignore[arg-type]
    assert_equal(*attended(case, tensors), Given(*pools, shorter, tensors.pages, out, lse))  # type: ignore[arg-type]


def test_lengths_that_make_no_sense_read_and_write_nothing_outside(device: str) -> None:
    case = CASES["padded"]
    tensors = given(case, torch.float32, device)
    assert tensors.pages.q_lengths is not None
    tensors.pages.kv_lengths.copy_(torch.tensor([2**31 - 1, -5, -(2**31)]))
    tensors.pages.q_lengths.copy_(torch.tensor([2**31 - 1, 3, -7]))
    tensors.k.nan_to_num_()
    tensors.v.nan_to_num_()
    out, lse = attended(case, tensors)
    assert out.isfinite().all()
    assert lse[1:].eq(-inf).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's numpy
def test_a_nan_in_a_query_stays_in_its_row(device: str) -> None:
    tensors = given(CASES["page 16"], torch.float32, device)
    tensors.q[0, 1, 2] = nan
    for splits in (1, 3):
        out, _ = attended(CASES["page 16"], tensors, tiles=PagedTiles(16, 16, 4, 2, splits))
        assert out[0, 1, 2].isnan().all()
        assert out.isnan().sum() == out.shape[-1]


def test_two_runs_give_the_same_bits(device: str) -> None:
    tensors = given(CASES["page 16"], torch.float32, device)
    runs = [attended(CASES["page 16"], tensors, tiles=PagedTiles(16, 16, 4, 2, 3)) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ["page 16", "padded", "packed", "spans", "spans, packed", "window"])
def test_the_slot_answers_for_tables_on_the_host_and_on_the_device(name: str, device: str) -> None:
    case = CASES[name]
    tensors = given(case, torch.float32, device)
    host = tensors.structure.prepare(torch.device(device), tuple(tensors.k.shape))
    blind = type(host)(
        tensors.pages.block_table, tensors.pages.kv_lengths, tensors.pages.q_lengths, None,
        host.host_kv if case.spans else None, None, case.spans,
    )  # fmt: skip
    for meta in (host, blind):
        out, lse = triton_paged.paged(
            tensors.q, tensors.k, tensors.v, None, meta=meta, causal=case.causal, scale=case.scale,
            window=case.window, softcap=case.softcap, need_lse=True, options=(),
        )  # fmt: skip
        assert lse is not None
        assert_equal(out, lse, tensors)


def test_no_lse_where_none_is_asked(device: str) -> None:
    tensors = given(CASES["page 16"], torch.float32, device)
    for splits in (1, 2):
        out, lse = paged_attention(
            tensors.q, tensors.k, tensors.v, None, tensors.pages, causal=True, scale=0.25, window=None, softcap=0.0,
            need_lse=False, tiles=PagedTiles(16, 16, 4, 2, splits),
        )  # fmt: skip
        assert lse is None
        torch.testing.assert_close(out.cpu().double(), tensors.out, atol=2e-5, rtol=0)


def test_slots_claim_no_gradients_and_no_window_beside_spans() -> None:
    plain, spans = (capabilities_of(slot.features) for slot in triton_paged.SLOTS)
    both = Capability.PAGED_KV | Capability.SOFTCAP | Capability.LSE | Capability.DETERMINISTIC | Capability.OUT
    both |= Capability.GRAPH_CAPTURE | Capability.COMPILE
    assert plain == both | Capability.WINDOW
    assert spans == both | Capability.SPANS


def test_slots_are_listed_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from polyattn.backends.triton_paged import SLOTS; assert SLOTS"
    subprocess.run([sys.executable, "-c", code], check=True)
