"""A small installed distribution of CPU backends, each with the one limit that a fault report is about."""

from __future__ import annotations

import sys
from pathlib import Path

import polyattn as pa

_ENTRY_POINTS = """
from polyattn.vendor import Backend, Features, Requires, Slot

ANY = frozenset({"float16", "bfloat16", "float32", "float64"})

def flash():
    return Backend("flash", (Slot("fault_slots:dense", Features(dtypes=frozenset({"float16", "bfloat16"}))),))

def listed():
    features = Features(dtypes=ANY, head_dims=frozenset({64, 96, 128}))
    return Backend("listed", (Slot("fault_slots:dense", features),), check=block_of_16)

def block_of_16(request, machine):
    rows = request.q.shape[1]
    return (f"{rows} query rows are fewer than its block of 16",) if rows == 14 else ()

def one_document():
    features = Features(kinds=frozenset({"packed"}), dtypes=ANY, max_documents=1)
    return Backend("one_document", (Slot("fault_slots:packed", features),))

def int8_only():
    return Backend("int8_only", (Slot("fault_slots:dense", Features(dtypes=ANY, quant=frozenset({"int8"}))),))

def absent():
    requires = (Requires("sage-kernels-of-nobody", "2.0", "pip install sage-kernels-of-nobody"),)
    return Backend("absent", (Slot("fault_slots:dense", Features(dtypes=ANY)),), requires=requires)
"""
_SLOTS = """
import polyattn as pa

def dense(q, k, v, out, *, meta, causal, scale, window, softcap, need_lse, options):
    return pa.reference_attention(q, k, v, scale=scale).to(q.dtype), None

def packed(q, k, v, out, *, meta, causal, scale, window, softcap, need_lse, options):
    documents = pa.Packed.from_lengths(meta.lengths_q, meta.lengths_k)
    return pa.reference_attention(q, k, v, structure=documents, scale=scale).to(q.dtype), None
"""
NAMES = ("flash", "listed", "one_document", "int8_only", "absent")


def install(site: Path) -> None:
    """Install the distribution into `site`, as pip would; `remove` undoes it."""
    info = site / "fault_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault-backends\nVersion: 1.0\n")
    lines = [f"cpu.{name} = fault_entry_points:{name}" for name in NAMES]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *lines, ""]))
    (site / "fault_entry_points.py").write_text(_ENTRY_POINTS)
    (site / "fault_slots.py").write_text(_SLOTS)
    sys.path.insert(0, str(site))
    pa.reload_environment()


def remove(site: Path) -> None:
    """Take it off the path and out of the process."""
    sys.path.remove(str(site))
    for name in ("fault_entry_points", "fault_slots"):
        sys.modules.pop(name, None)
    pa.reload_environment()
