"""Writes the tables of docs/capabilities.md: what every backend states, and where the conformance kit proved it.

    python -m scripts.capabilities_page            # --print shows them and writes nothing

Flags and limits are the slots' own. "Proved" is read from two places: the records of the kit on devices
(`benchmarks/results/conformance*.json`), and the tests that run it on emulators (`tests/emulators/`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

from polyattn.backends import torch_varlen
from polyattn.cli.capabilities import Matrix, matrix
from polyattn.vendor import Capability

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "capabilities.md"
START, END = "<!-- tables: start -->", "<!-- tables: end -->"
RESULTS = ROOT / "benchmarks" / "results"

PLATFORMS = {
    "cpu": "CPU",
    "cuda": "NVIDIA CUDA",
    "rocm": "AMD ROCm",
    "npu": "Ascend NPU",
    "xpu": "Intel XPU",
    "musa": "Moore Threads MUSA",
}

#: The reference build: this torch, and none of the vendors' packages, for which the registry's release then stands.
TORCH = "2.13.0"
#: What `varlen_attn` of that torch takes.
VARLEN_ATTN = frozenset(
    {
        "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux", "scale", "window_size",
        "enable_gqa", "seqused_k", "block_table", "num_splits",
    }
)  # fmt: skip

#: In which of the kit's structures a structure's capability is asked for; other capabilities are asked for in all.
STRUCTURE_OF = {
    "PACKED_MASK_FREE": "packed",
    "MULTI_DOC_VARLEN": "packed",
    "PAGED_KV": "paged",
    "KEY_PADDING": "key_padding",
    "PREFIX_KV": "key_padding",
    "BOOL_MASK": "mask",
    "BIAS": "mask",
    "SPANS": "spans",
    "VIDEO_TILES": "video_tiles",
}


@dataclass(frozen=True)
class Run:
    """One backend's kit: whether it reached its end, the structures that it proved (None: all), and its words."""

    whole: bool
    structures: frozenset[str] | None
    words: str

    def proves(self, capability: str) -> bool:
        """Whether it asked for that capability, as far as can be told."""
        structure = STRUCTURE_OF.get(capability)
        return structure is None or self.structures is None or structure in self.structures


def tables(matrices: Iterable[Matrix], devices: Mapping[str, Run], emulators: Mapping[str, Run]) -> str:
    """All platforms; `devices` and `emulators` have the runs by full names of backends, such as cuda:fa3."""
    return "\n\n".join(section(facts, devices, emulators) for facts in matrices)


def section(facts: Matrix, devices: Mapping[str, Run], emulators: Mapping[str, Run]) -> str:
    """One platform: its capabilities by backend, and below them the limits and what was run."""
    platform, backends = facts["platform"], facts["backends"]
    names = {backend: f"{platform}:{backend}" for backend in backends}
    rows = [
        (flag, *(cell(flag, backends[one]["capabilities"], devices.get(name), emulators.get(name))
                 for one, name in names.items()))
        for flag in Capability.__members__
    ]  # fmt: skip
    limits = [
        (f"`{one}`", *backends[one]["limits"].values(), _words(devices.get(name)), _words(emulators.get(name)))
        for one, name in names.items()
    ]
    return "\n\n".join(
        (
            f"## {PLATFORMS[platform]} (`{platform}`)",
            table((platform, *(f"`{one}`" for one in backends)), rows),
            table(("", "dtypes", "head dims", "page sizes", "documents", "kit on hardware", "kit on emulator"), limits),
        )
    )


def cell(flag: str, claimed: Sequence[str], device: Run | None, emulator: Run | None) -> str:
    """What one backend's cell says of one capability."""
    if flag not in claimed:
        return "refused"
    shown = []
    if device is not None and device.proves(flag):
        if device.whole:
            return "hardware"
        shown.append("in part")
    # no emulator has device graphs, so that the kit leaves captures out there
    if emulator is not None and emulator.proves(flag) and flag != "GRAPH_CAPTURE":
        shown.append("emulator")
    return ", ".join(shown) or "claimed"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def recorded(record: Mapping[str, Any]) -> dict[str, Run]:
    """The runs of one record of the kit on a device, as `scripts/gpu.py` writes it."""
    runs = {}
    for one in record["backends"]:
        machine = one.get("machine", record["machine"])
        native = frozenset(structure for structure, counts in one["counts"].items() if counts["native"])
        failed = sum(counts["failed"] for counts in one["counts"].values())
        words = _on(machine, machine["versions"]["torch"]) + f"{one['ran']} of {one['planned']} cases"
        if failed:
            words += f", {failed} began and did not end"
        wrong = [
            failure["case"]
            for failure in one["failures"]
            if any("did not end" not in problem for problem in failure["problems"])
        ]
        if wrong:
            raise ValueError(f"{one['backend']} was wrong on {machine['device']}: {', '.join(wrong)}")
        runs[one["backend"]] = Run(one["ok"], native, words)
    return runs


def recorded_by_hand(record: Mapping[str, Any]) -> dict[str, Run]:
    """The runs of a record that has one entry a run, "<platform>_<backend>_<dtypes>[_<structures>]", with its cases."""
    asked: dict[str, list[str]] = {}
    structures: dict[str, set[str]] = {}
    for one in record["ran"]:
        platform, backend, dtypes, *some = one["run"].split("_", 3)
        if not one["ok"] or one["failures"]:
            raise ValueError(f"{one['run']} failed on {record['machine']['device']}")
        name = f"{platform}:{backend}"
        asked.setdefault(name, []).append(
            dtypes.replace("-", ", ") + (f" ({some[0].replace('-', ', ')})" if some else "")
        )
        structures.setdefault(name, set()).update(one["cases"])
    where = _on(record["machine"], record["machine"]["torch"].partition("+")[0])
    cut = {line.split()[0] for line in record["not finished"]}
    return {
        name: Run(name not in cut, frozenset(structures[name]), where + "; ".join(runs)) for name, runs in asked.items()
    }


def emulated(dtypes: Sequence[str], structures: Sequence[str] | None = None) -> Run:
    """A green run of the kit on an emulator, in these structures (None: all, and that every claim is accepted)."""
    words = ", ".join(dtypes) if structures is None else f"{', '.join(dtypes)} ({', '.join(structures)})"
    return Run(structures is None, None if structures is None else frozenset(structures), words)


def runs_on_devices() -> dict[str, Run]:
    """Of the records in benchmarks/results/, and of the tests' own processor."""
    here = "the tests' own processor: all cases"
    runs = {f"cpu:{backend}": Run(True, None, here) for backend in ("sdpa", "blocked")}  # tests/conformance/test_cpu.py
    for path in sorted(RESULTS.glob("conformance*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        runs |= recorded(record) if "backends" in record else recorded_by_hand(record)
    return runs


def runs_on_emulators() -> dict[str, Run]:
    """Of the tests that run the kit on emulators: what they state there is asked for."""
    cuda, rocm, npu, xpu, musa = (
        import_module(f"tests.emulators.{vendor}.test_kit_on_emulators") for vendor in list(PLATFORMS)[1:]
    )
    runs = {f"cuda:{backend}": emulated(["bfloat16"]) for backend in cuda.EMULATORS}
    runs |= {f"rocm:{backend}": emulated(["bfloat16"]) for backend in rocm.EMULATORS}
    runs["rocm:triton"] = emulated(**rocm.INTERPRETED)
    runs |= {f"npu:{backend}": emulated(["bfloat16"]) for backend in npu.NAMES}
    runs["npu:sdpa"] = emulated(["float16"], ["dense"])
    runs |= {f"xpu:{one}": emulated(dtypes, xpu.STRUCTURES.get(one)) for one, (dtypes, _) in xpu.NATIVE.items()}
    runs |= {f"musa:{backend}": emulated([dtype]) for backend, (dtype, *_) in musa.NATIVE.items()}
    return runs


def reference_matrices() -> list[Matrix]:
    """What all platforms state on the reference build; in a process that has not imported them yet."""
    rooms = {name: "polyattn.backends.cpu" if name == "cpu" else f"polyattn_{name}.backends" for name in PLATFORMS}
    early = [room for room in rooms.values() if room.partition(".")[0] != "polyattn" and room in sys.modules]
    if early:
        raise RuntimeError(f"{', '.join(early)}: imported before, as installed here; use a process of its own")
    with (
        mock.patch.object(metadata, "version", _reference_version),
        mock.patch.object(torch_varlen, "PARAMETERS", VARLEN_ATTN),
    ):
        return [matrix(name, import_module(room).BACKENDS) for name, room in rooms.items()]


def _reference_version(name: str) -> str:
    if name == "torch":
        return TORCH
    raise metadata.PackageNotFoundError(name)


def _on(machine: Mapping[str, Any], torch: str) -> str:
    return f"{machine['device']}, torch {torch}, {machine['date']}: "


def _words(run: Run | None) -> str:
    return "-" if run is None else run.words


def written() -> str:
    """The tables that the page has."""
    return PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.capabilities_page", description=__doc__.partition("\n")[0])
    parser.add_argument("--print", action="store_true", dest="shown", help="to standard output, and write nothing")
    shown = parser.parse_args().shown
    text = tables(reference_matrices(), runs_on_devices(), runs_on_emulators())
    if shown:
        print(text)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
