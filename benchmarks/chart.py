"""A PNG of one run, if matplotlib is there."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Row

COLORS = {"eager": "#9aa0a6", "aot_eager": "#5f6368", "inductor": "#e8710a", "alt": "#1a73e8"}


def draw(rows: Sequence[Row], title: str, path: Path) -> str:
    """Draw bars per case and backend: run time relative to eager, and seconds to compile from an empty cache.

    Returns one line: where the chart is, or why there is none.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return "no chart: matplotlib is not installed"
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    done = [row for row in rows if row.ok]
    if not done:
        return "no chart: nothing finished"
    cases = list(dict.fromkeys(row.case for row in done))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 2 + 0.45 * len(cases)), sharey=True)
    _bars(left, done, cases, [row.speedup for row in done], "times eager's speed (longer is better)")
    left.axvline(1.0, color="black", linewidth=0.8)
    _bars(right, done, cases, [row.cold_seconds for row in done], "seconds of the first call, cold (shorter is better)")
    left.set_yticks(range(len(cases)), cases)
    left.invert_yaxis()
    right.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"chart: {path}"


def _bars(axis: Any, rows: Sequence[Row], cases: Sequence[str], values: Sequence[float | None], label: str) -> None:
    backends = list(dict.fromkeys(row.backend for row in rows))
    height = 0.8 / len(backends)
    for i, backend in enumerate(backends):
        present = [(row, value) for row, value in zip(rows, values, strict=True) if row.backend == backend]
        places = [cases.index(row.case) + (i - (len(backends) - 1) / 2) * height for row, _ in present]
        lengths = [value or 0.0 for _, value in present]
        bars = axis.barh(places, lengths, height, label=backend, color=COLORS.get(backend))
        axis.bar_label(bars, [f"{length:.2f}" for length in lengths], padding=2, fontsize=7)
    axis.margins(x=0.1)  # room for the labels
    axis.set_xlabel(label)
