"""Draws what a record of benchmarks/results measured along an axis: time of video attention against what is kept.

python -m scripts.docs_plots benchmarks/results/video_h200.json kept.svg
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

#: Beside a comparison's times: [share asked for, share kept, milliseconds, the limit's milliseconds or None] a point.
_POINTS = "plot"
_COLOURS = ("#2a7f62", "#c1553b")


def drawn(record: dict[str, Any]) -> str:
    """An SVG of every curve of the record, with the limit: the dense time by the share that is kept.

    LookupError where the record holds no curve.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    curves = {name: one for name, one in record["comparisons"].items() if _POINTS in one}
    if not curves:
        raise LookupError("the record holds no curve")
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for colour, (name, one) in zip(_COLOURS, curves.items(), strict=False):
        kept, taken, limits = ([point[place] for point in one[_POINTS]] for place in (1, 2, 3))
        axes.plot([100 * share for share in kept], taken, "o-", color=colour, label=name.partition(":")[0])
    dense = one["milliseconds"].get("fa3 dense")
    if dense is not None:
        axes.axhline(dense, color="#555", linestyle="--", label="dense FA3")
        axes.plot([100 * share for share in kept], limits, ":", color="#555", label="dense FA3 by the share kept")
    axes.set_xlabel("tiles kept, %")
    axes.set_ylabel("ms, from raster q, k, v to raster output")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(f"Video sparse attention, {record['machine']['device']}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def main() -> int:
    """The command line: a record, and the file to write."""
    if len(sys.argv) != 3:
        print("usage: python -m scripts.docs_plots RECORD FILE", file=sys.stderr)
        return 2
    record = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(drawn(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
