"""Bars of measured times: as text always, as a PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

#: Title -> backend -> milliseconds, fastest first.
Charts = Mapping[str, Mapping[str, float]]


def bar(value: float, longest: float, width: int = 24, mark: str = "#") -> str:
    """A bar of text, at least one mark long.

    >>> bar(1.0, 4.0, width=8)
    '##'
    """
    return mark * max(1, round(width * value / longest)) if longest > 0 else mark


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
        bars = panel.barh(labels, values, color=["#2a7f62", *["#9db4c0"] * (len(values) - 1)])
        panel.bar_label(bars, labels=[f" {value:.4g} ms" for value in values], fontsize=8)
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set_title(name, loc="left", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)
