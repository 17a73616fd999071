"""The Hopper kernel compiles for sm_90 and fits on it, in the order that is fast; nobody else is served by it."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from polyattn.kernels.video_fine import Blocks, Coarse, Listed
from polyattn.kernels.video_hopper import REGISTERS_OF, listed_attention_hopper, listed_hopper
from polyattn.kernels.video_tiles import _HOPPER, HopperTile, hopper_tile
from tests.kernels.launches import absent_gpus, watched
from tests.kernels.offline import TARGETS, _usage_of_cubin

INTERPRETED = False  # read by conftest.py: compiling needs Triton as it is

_LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, fp4_padded=False, "
    "cga_layout=[])"
)
#: Bytes of a thread's stack: what the whole run of a program needs, none of what a step does.
_STACK = 192


@cache
def _compiled(tile: HopperTile, dtype: str, gated: bool, lse: bool, every: bool) -> Any:
    """As it is launched; `offline.py` knows Triton's own dialect alone."""
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = listed_hopper
    types = {one.name: "constexpr" if one.is_constexpr else "i32" for one in kernel.params}
    types |= dict.fromkeys(("order", "starts", "ends", "steps", "taken"), "*i32")
    types |= dict.fromkeys(("k_described", "v_described"), f"tensordesc<{dtype}[{tile.box}, 64],{_LAYOUT}>")
    types |= {"q": f"*{dtype}", "out": f"*{dtype}", "outer": "fp32"}
    constants: dict[str, Any] = {
        "UNIT": 8, "SIGN": 1.0, "GROUPS": tile.groups, "EVERY": every, "BOX": tile.box, "KEYS": tile.keys,
        "STAGES": tile.stages,
    }  # fmt: skip
    for name, kind, there in (
        ("gate", f"*{dtype}", gated),
        ("coarse", "*fp32", gated),
        ("lse", "*fp32", lse),
    ):
        types[name] = kind if there else "constexpr"
        if not there:
            constants[name] = None
    aligned = [kernel.arg_names.index(name) for name in ("q", "out", *(("gate",) if gated else ()))]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = GluonASTSource(kernel, types, constants, attributes)
    options = {"num_warps": 4, "maxnreg": REGISTERS_OF[tile.groups], "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS["sm_90"][0], options=options)


def _blocks(cubin: bytes, folder: Path) -> list[str]:
    """The machine code between labels."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    shown = subprocess.run([tool, "-c", file], check=True, capture_output=True, text=True).stdout
    return re.split(r"^\.L_x_\d+:$", shown, flags=re.MULTILINE)


#: Tile, dtype, gate, LSE, dense rows.
CASES = {
    "one group": (_HOPPER[1], "bf16", True, False, False),
    "one group, dense rows": (_HOPPER[1], "fp16", True, True, True),
    "two groups": (_HOPPER[2], "bf16", True, False, False),
    "two groups, dense rows": (_HOPPER[2], "fp16", False, True, True),
    "boxes of a step": (HopperTile(2, 128, 128, 2), "bf16", False, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_it_compiles_and_fits(case: str) -> None:
    tile, *rest = CASES[case]
    kernel = _compiled(tile, *rest)
    registers, stack = _usage_of_cubin(kernel.asm["cubin"])
    sys.stdout.write(f"{case}: {registers} registers at first, {stack} stack, {kernel.metadata.shared} shared\n")
    assert kernel.metadata.num_warps == 4 * (tile.groups + 1)
    programs = 3 - tile.groups
    assert programs * registers * kernel.metadata.num_warps * 32 <= 65_536
    assert stack <= _STACK
    assert kernel.metadata.shared <= tile.shared
    assert programs * (tile.shared + 1024) <= TARGETS["sm_90"][1] + 1024  # each takes 1 KiB more than it asks for


@pytest.mark.parametrize("case", CASES)
def test_a_step_weighs_its_scores_while_products_run(case: str, tmp_path: Path) -> None:
    """Between the wait for the scores and that for the values' products are the powers; nothing goes to the stack."""
    tile, *rest = CASES[case]
    blocks = _blocks(_compiled(tile, *rest).asm["cubin"], tmp_path)
    steps = [place for place, text in enumerate(blocks) if "gsb0, 0x1" in text]
    assert len(steps) == 2 * tile.groups  # a loop without and one with a mask
    for place in steps:
        waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", "".join(blocks[place : place + 4]), maxsplit=1)[0]
        started, weighed = waits.split("gsb0, 0x1", 1)
        assert started.count("HGMMA") >= tile.keys // 16 + 8
        assert weighed.count("MUFU.EX2") >= tile.keys // 2
        assert not re.search(r"\bSTL\b", blocks[place])
        assert len(re.findall(r"\bLDL\b", blocks[place])) <= 2  # a number of the item may be read back
    copies = "".join(blocks)
    assert copies.count("UTMALDG") >= 2 * 2 * tile.keys // tile.box


def test_nobody_else_is_served() -> None:
    served: dict[str, Any] = {
        "arch": "sm_90",
        "head_dim": 128,
        "v_head_dim": 128,
        "element_size": 2,
        "block_q": 256,
        "lines": 75600,
    }
    assert hopper_tile(**served) == _HOPPER[2]
    others = [("arch", one) for one in ("", "sm_80", "sm_100", "sm_120", "gfx942")]
    others += [("head_dim", 64), ("v_head_dim", 256), ("element_size", 4), ("block_q", 32), ("lines", 1 << 31)]
    for name, value in others:
        assert hopper_tile(**{**served, name: value}) is None, name


def test_no_group_is_idle_in_a_whole_block() -> None:
    rows = {block: hopper_tile("sm_90", 128, 128, 2, block, 1000) for block in (64, 100, 128, 192, 256, 320, 512, 1000)}
    groups = {block: tile.groups for block, tile in rows.items() if tile}
    assert groups == {64: 1, 100: 2, 128: 2, 192: 1, 256: 2, 320: 1, 512: 2, 1000: 2}


def test_nobody_else_imports_it() -> None:
    """Gluon is in no other kernel's way: it is imported for a tile of its own, on its architecture."""
    asked = "import sys, polyattn.backends.triton_video, polyattn.kernels.video_attention\n"
    asked += "sys.exit(any(name.startswith('polyattn.kernels.video_hopper') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_triton_takes_its_arguments() -> None:
    """Bound, specialised and compiled as on a GPU, but not run."""
    order = torch.arange(300, dtype=torch.int32)
    blocks = Blocks(torch.tensor([0, 256]).int(), torch.tensor([256, 300]).int(), 256, order)
    lists, counts = torch.zeros(2, 3, 2, 1, dtype=torch.int32), torch.ones(2, 3, 2, dtype=torch.int32)
    q, k, v = (torch.zeros(2, 300, heads, 128, dtype=torch.bfloat16) for heads in (3, 1, 1))
    out = torch.empty_like(q)
    coarse = Coarse(torch.zeros_like(q), torch.zeros(2, 3, 2, 128))
    with absent_gpus(), watched() as seen:
        listed_attention_hopper(
            q, k, v, out, torch.empty(2, 3, 300), blocks, blocks, Listed(lists, counts, 300),
            _HOPPER[2], scale=0.1, coarse=coarse,
        )  # fmt: skip
    ours = seen[-1]
    assert ours.grid == (2 * 2 * 3 * 2, 1, 1)
    assert ours.arguments[:2] == (q.data_ptr(), out.data_ptr())
    assert [one.shape for one in ours.arguments[5:7]] == [[856, 128], [856, 128]]
    assert [one.block_shape for one in ours.arguments[5:7]] == [[32, 64], [32, 64]]
