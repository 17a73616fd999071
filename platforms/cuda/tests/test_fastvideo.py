"""fastvideo: what fastvideo_kernel gets from us, and what is made of its answers, over its emulation on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.vendor import Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve
from polyattn_cuda import fastvideo, fastvideo_forward, fastvideo_package
from tests.emulators.cuda import fastvideo as emulator

pytestmark = pytest.mark.emulated

CALL: dict[str, Any] = {"causal": False, "window": None, "softcap": 0.0, "options": ()}
VERSIONS = {"fastvideo-kernel": "0.3.5", "einops": "0.8.1", "triton": "3.6.0"}
LAYOUT = pa.VideoLayout((5, 6, 10), prefix=(30, 70), used=407)


@pytest.fixture(params=[False, True], ids=["triton", "compiled"])
def loaded(request: pytest.FixtureRequest) -> Iterator[bool]:
    emulator.install(compiled=request.param)
    fastvideo_package.fine.cache_clear()
    fastvideo_package._tell_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cuda:fastvideo: the compiled kernels")
        yield request.param
    fastvideo_package.fine.cache_clear()
    emulator.uninstall()


def drawn(batch: int, rows: int, seed: int, width: int = 64) -> torch.Tensor:
    return torch.randn(batch, rows, 2, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(structure: pa.VideoTiles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **asked: Any) -> Any:
    meta = structure.bind(q.device, q.shape, k.shape)
    gate = asked.pop("gate", None)
    need_lse = asked.pop("need_lse", False)
    meta = meta if gate is None else meta.with_gate(gate)
    return fastvideo_forward.video_tiles(
        q, k, v, None, meta=meta, scale=q.shape[-1] ** -0.5, need_lse=need_lse, **CALL
    )  # fmt: skip


@pytest.mark.parametrize("tile", [(4, 4, 4), (4, 4, 8), (4, 8, 8)])
@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_the_reference(loaded: bool, tile: tuple[int, int, int], batch: int) -> None:
    q, k, v, gate = (drawn(batch, 420, seed) for seed in range(4))
    for x in (q, k, v, gate):
        x[:, 407:] = float("nan")
    for topk in (1, 3):
        structure = pa.VideoTiles(LAYOUT, tile, topk=topk)
        exact = (x.double() for x in (q, k, v))
        want = pa.reference_attention(*exact, structure=structure, gate=gate)
        out, _ = run(structure, q, k, v, gate=gate)
        torch.testing.assert_close(out.double(), want, atol=4e-2, rtol=0)


def test_without_a_gate_there_is_no_coarse_term_and_the_lse_is_natural(loaded: bool) -> None:
    q, k, v = (drawn(2, 420, seed) for seed in range(3))
    structure = pa.VideoTiles(LAYOUT, (4, 4, 4), topk=2)
    want, want_lse = pa.reference_attention(q, k, v, structure=structure, return_lse=True)
    out, lse = run(structure, q, k, v, need_lse=True)
    torch.testing.assert_close(out.double(), want, atol=4e-2, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=0)


def test_scores_of_any_range_choose_as_many_tiles_as_asked(loaded: bool) -> None:
    layout = pa.VideoLayout((4, 8, 40))  # 20 tiles, of which its own choice would keep 19
    shape = (1, layout.rows, 2, 64)
    meta = pa.VideoTiles(layout, (4, 4, 4), topk=3).bind(torch.device("cpu"), shape, shape)
    scores = torch.randn(1, 2, 20, 20)
    scores[..., 5] = -1e30
    scores[:, :, 0] = 0.0
    scores[:, :, 1, 7:9] = float("nan")
    kept = fastvideo_forward._block_map(scores, meta)
    assert (kept.sum(-1) == 3).all()
    assert kept[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2]
    assert kept[:, :, 1, 7:9].all()


def test_that_the_extension_does_not_load_is_told_of_once(loaded: bool) -> None:
    q = drawn(2, 64, 0)
    structure = pa.VideoTiles(pa.VideoLayout((4, 4, 4)), (4, 4, 4), topk=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            run(structure, q, q, q)
    texts = [str(one.message) for one in told if one.category is pa.PolyattnWarning]
    assert len(texts) == (0 if loaded else 1)
    assert all("Triton kernels run" in text and "LD_PRELOAD" in text for text in texts)


def test_an_import_that_fails_keeps_its_cause() -> None:
    emulator.install(device=False)
    fastvideo_package.fine.cache_clear()
    try:
        with pytest.raises(ImportError, match="0 active drivers"):
            fastvideo_package.fine(64)
    finally:
        emulator.uninstall()


def decision(tile: tuple[int, int, int] = (4, 4, 4), env: dict[str, str] | None = None, **asked: Any) -> Any:
    structure = pa.VideoTiles(LAYOUT, tile, topk=2)
    head_dim = asked.pop("head_dim", 64)
    versions = asked.pop("versions", VERSIONS)
    tensor = TensorFacts.contiguous((1, 407, 2, head_dim), asked.pop("dtype", "bfloat16"))
    asked = {"scale": head_dim**-0.5, "structure_kind": "video_tiles", "structure_facts": structure.facts, **asked}
    request = Request(tensor, tensor, tensor, device="cuda:0", **asked)
    machine = Machine("cuda", "cuda", arch="sm_90", versions=versions, env=env or {})
    return resolve(request, machine, [fastvideo.backend()])[0]


@pytest.mark.parametrize("tile", [(4, 4, 4), (4, 4, 8), (4, 8, 8)])
def test_it_takes_the_volumes_that_it_has_kernels_for(tile: tuple[int, int, int]) -> None:
    assert isinstance(decision(tile), Accepted)
    assert isinstance(decision(tile, lse=True), Accepted)


@pytest.mark.parametrize(("words", "asked"), [
    ("tiles of 100 tokens (4, 5, 5), and its kernels are for 64, 128, 256", {"tile": (4, 5, 5)}),
    ("scale 0.2, and its kernels scale by head_dim ** -0.5 = 0.125", {"scale": 0.2}),
    ("dtype float16 not in (bfloat16)", {"dtype": "float16"}),
    ("head_dim 80 not in (64, 128)", {"head_dim": 80}),
    ("gradients", {"grad": True}),
    ("graph capture", {"capturing": True}),
    ("deterministic", {"deterministic": True}),
    ("structure 'dense'", {"structure_kind": "dense", "structure_facts": StructureFacts()}),
    ("einops", {"versions": {"fastvideo-kernel": "0.3.5", "triton": "3.6.0"}}),
    ("package fastvideo-kernel is not installed: pip install --no-deps", {"versions": {}}),
    ("package fastvideo-kernel 0.3.2 is older than 0.3.5", {"versions": VERSIONS | {"fastvideo-kernel": "0.3.2"}}),
    ("CUTEDSL", {"tile": (4, 8, 8), "lse": True, "env": {"FASTVIDEO_VSA_CUTEDSL": "1"}}),
])  # fmt: skip
def test_it_refuses_with_the_reason(words: str, asked: dict[str, Any]) -> None:
    refused = decision(**asked)
    assert isinstance(refused, Rejected)
    assert words in "; ".join(refused.reasons)
