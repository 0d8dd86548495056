"""Ratios, geometric means, and the printed table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.records import Measurement, Row

FLOOR = "aot_eager"
HEADER = (
    "case",
    "backend",
    "cold s",
    "own s",
    "warm s",
    "own s",
    "eager ms",
    "ms",
    "x eager",
    "range",
    "error",
    "graphs",
    "peak GB: eager, it",
)


def geomean(values: Iterable[float]) -> float | None:
    """exp(mean(log v)); None of no values. ValueError if a value is not positive."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None where either is missing or b is 0."""
    return None if a is None or not b else a / b


def own_seconds(row: Row, rows: Sequence[Row], warm: bool = False) -> float | None:
    """The row's first call minus aot_eager's of the same case: the compiler's own. May be negative noise."""
    if row.backend == FLOOR:
        return None
    floor = find_row(rows, row.case, FLOOR)
    if floor is None or not (floor.ok and row.ok):
        return None
    total, base = (row.warm_seconds, floor.warm_seconds) if warm else (row.cold_seconds, floor.cold_seconds)
    return None if total is None or base is None else total - base


def find_row(rows: Sequence[Row], case: str, backend: str) -> Row | None:
    return next((row for row in rows if (row.case, row.backend) == (case, backend)), None)


@dataclass(frozen=True)
class Comparison:
    """Theirs over ours for one case, so that above 1 is better; None where a figure is missing.

    run_time is the ratio of the two `x eager`, each taken against eager in its own process. own is the cold one.
    """

    case: str
    run_time: float | None
    cold: float | None
    warm: float | None
    own: float | None


def compare(rows: Sequence[Row], ours: str, theirs: str) -> list[Comparison]:
    """One comparison for every case that both backends finished."""
    result = []
    for row in rows:
        other = find_row(rows, row.case, theirs)
        if row.backend != ours or not row.ok or other is None or not other.ok:
            continue
        own = _positive_ratio(own_seconds(other, rows), own_seconds(row, rows))
        cold = ratio(other.cold_seconds, row.cold_seconds)
        warm = ratio(other.warm_seconds, row.warm_seconds)
        result.append(Comparison(row.case, ratio(row.speedup, other.speedup), cold, warm, own))
    return result


def results_table(rows: Sequence[Row]) -> str:
    """One line per row, then one line of geometric means per backend."""
    lines = [_line(row, rows) for row in rows]
    means = [_mean_line(backend, rows) for backend in dict.fromkeys(row.backend for row in rows)]
    return layout([HEADER, *lines, *means], left=2)


def comparison_table(rows: Sequence[Row], ours: str = "alt", theirs: str = "inductor") -> str | None:
    """ours against theirs per case with geometric means; None where no case was finished by both."""
    compared = compare(rows, ours, theirs)
    if not compared:
        return None
    figures = [(found.run_time, found.cold, found.warm, found.own) for found in compared]
    lines = [(compared[i].case, *(_number(value, 2) for value in values)) for i, values in enumerate(figures)]
    means = [_mean(column, 2) for column in zip(*figures, strict=True)]
    header = (f"{theirs} / {ours}", "run time", "cold", "warm", "cold own")
    return layout([header, *lines, ("geometric mean", *means)])


def layout(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Padded columns, the first `left` to the left. A line shorter than the header ends in a cell of free text."""
    count = len(lines[0])
    widths = [max(len(line[i]) for line in lines if len(line) == count or i < len(line) - 1) for i in range(count)]
    return "\n".join(_padded(line, widths, left) for line in lines)


def _padded(line: Sequence[str], widths: Sequence[int], left: int) -> str:
    free = line[-1:] if len(line) < len(widths) else ()
    cells = line[: len(line) - len(free)]
    padded = [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(cells)]
    return "  ".join([*padded, *free]).rstrip()


def _line(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    if row.failure is not None:
        return row.case, row.backend, f"FAILED {row.failure.summary}"
    first = row.cold[0]
    return (
        row.case,
        row.backend,
        _number(row.cold_seconds, 1),
        _number(own_seconds(row, rows), 1),
        _number(row.warm_seconds, 1),
        _number(own_seconds(row, rows, warm=True), 1),
        _number(row.eager_ms, 3),
        _number(row.compiled_ms, 3),
        _number(row.speedup, 2),
        f"{min(row.speedups):.2f}-{max(row.speedups):.2f}",
        f"{row.worst_error:.0e}",
        f"{first.graphs}+{first.graph_breaks}" if first.graph_breaks else str(first.graphs),
        _peaks(first),
    )


def _peaks(m: Measurement) -> str:
    if m.eager_peak_bytes is None or m.compiled_peak_bytes is None:
        return ""
    return f"{m.eager_peak_bytes / 1e9:.2f}, {m.compiled_peak_bytes / 1e9:.2f}"


def _mean_line(backend: str, rows: Sequence[Row]) -> tuple[str, ...]:
    tried = [row for row in rows if row.backend == backend]
    done = [row for row in tried if row.ok]
    return (
        f"geometric mean ({len(done)} of {len(tried)})",
        backend,
        _mean([row.cold_seconds for row in done], 1),
        _mean([own_seconds(row, rows) for row in done], 1),
        _mean([row.warm_seconds for row in done], 1),
        _mean([own_seconds(row, rows, warm=True) for row in done], 1),
        "",
        "",
        _mean([row.speedup for row in done], 2),
        "",
        "",
        "",
        "",
    )


def _mean(values: Sequence[float | None], digits: int) -> str:
    """The geometric mean, blank where a value is missing or not positive: a mean of the rest would flatter."""
    present = [value for value in values if value is not None and value > 0]
    return _number(geomean(present), digits) if len(present) == len(values) else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _positive_ratio(a: float | None, b: float | None) -> float | None:
    return ratio(a, b) if a is not None and b is not None and a > 0 and b > 0 else None
