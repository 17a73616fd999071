"""What a long command is at: a bar on standard error while it is a terminal and rich is installed, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def progress(names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Yields what is told of each name when its turn begins; the bar goes away at the end, and with an error."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _silent
        return
    if not sys.stderr.isatty():  # whatever FORCE_COLOR says: a log wants no bar
        yield _silent
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # drawn between the names alone: a thread that draws meanwhile would take its part of what is timed
    bar = Progress(
        *columns,
        console=Console(file=sys.stderr),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
    )
    with bar:
        task = bar.add_task("", total=len(names))

        def begins(name: str) -> None:
            bar.update(task, description=name, completed=names.index(name), refresh=True)

        yield begins


def _silent(name: str) -> None:
    """Nobody looks."""
