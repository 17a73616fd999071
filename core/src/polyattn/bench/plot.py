"""Bars of measured times: as text always, as a PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

#: Title -> backend -> milliseconds, fastest first.
Charts = Mapping[str, Mapping[str, float]]


#: How many times the fastest a bar is drawn at most: one backend that is a hundred times slower would flatten the rest.
_LONGEST = 4.0


def bar(ratio: float, width: int = 24, mark: str = "#") -> str:
    """A bar of text for a time that is `ratio` times the fastest; one that is cut ends in "+".

    >>> bar(1.0, width=8), bar(4.0, width=8), bar(100.0, width=8)
    ('##', '########', '########+')
    """
    return mark * max(1, round(width * min(ratio, _LONGEST) / _LONGEST)) + ("+" if ratio > _LONGEST else "")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(path: Path, charts: Charts, *, title: str) -> None:
    """Write a PNG: a panel a chart, each with its own scale in milliseconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [1.0 + 0.32 * len(times) for times in charts.values()]
    figure = Figure(figsize=(9.0, 0.8 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, times) in zip(panels, charts.items(), strict=True):
        labels, values = list(times), list(times.values())
        most = _LONGEST * min(values)
        drawn = [min(value, most) for value in values]
        bars = panel.barh(labels, drawn, color=["#2a7f62", *["#9db4c0"] * (len(values) - 1)])
        told = [f" {value:.4g} ms" + (" (bar cut)" if value > most else "") for value in values]
        panel.bar_label(bars, labels=told, fontsize=8)
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set_title(name, loc="left", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)
