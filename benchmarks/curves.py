"""python -m benchmarks.curves A.json B.json --out FILE.svg: what `benchmarks.scaling --out` has measured, as a picture.

Two panels over the number of nodes (logarithmic): microseconds of the backend's own processor time per node, and KiB
of memory per node above what AOTAutograd had needed. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN, GAP = 380, 250, 56, 40
KEY = 20  # height of the line of names
COLORS = ("#1a73e8", "#e8710a", "#188038", "#d93025", "#9334e6", "#5f6368")
Figures = Mapping[str, float]
Curve = Sequence[tuple[float, float]]

PANELS: tuple[tuple[str, Callable[[Figures], float]], ...] = (
    ("us per node", lambda f: f["own"] / f["nodes"] * 1e6),
    ("KiB per node", lambda f: f["bytes"] / f["nodes"] / 1024),
)


def picture(rows: Mapping[str, Sequence[Figures]]) -> str:
    """The SVG text; `rows`: kind -> figures per size (at least `nodes`, `own` seconds, `bytes`)."""
    total = 2 * WIDTH + 3 * GAP + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT + 2 * MARGIN + KEY}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for k, (label, value) in enumerate(PANELS):
        curves = {
            kind: [(f["nodes"], value(f)) for f in sorted(found, key=lambda f: f["nodes"])]
            for kind, found in rows.items()
        }
        left = MARGIN + k * (WIDTH + MARGIN + GAP)
        out += [f'<g transform="translate({left},{MARGIN})">', *_panel(label, curves), "</g>"]
    for n, kind in enumerate(rows):
        at, color = MARGIN + n * 140, COLORS[n % len(COLORS)]
        y = HEIGHT + 2 * MARGIN + KEY // 2
        out.append(f'<line x1="{at}" x2="{at + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="2"/>')
        out.append(f'<text x="{at + 22}" y="{y}">{escape(kind)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _panel(label: str, curves: Mapping[str, Curve]) -> list[str]:
    points = [p for curve in curves.values() for p in curve]
    first, last = (math.log10(f(x for x, _ in points)) for f in (min, max))
    top = _round_up(max(y for _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        return (math.log10(x) - first) / max(last - first, 1e-9) * WIDTH, HEIGHT - max(y, 0.0) / top * HEIGHT

    out = [
        f'<text x="0" y="-10">{escape(label)}</text>',
        f'<path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#444"/>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = HEIGHT * (1 - share)
        out.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{top * share:g}</text>')
    for power in range(math.ceil(first), math.floor(last) + 1):
        x, _ = at(10.0**power, 0)
        out.append(f'<text x="{x:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{10**power:,}</text>')
    out.append(f'<text x="{WIDTH}" y="{HEIGHT + 34}" text-anchor="end">nodes</text>')
    for n, curve in enumerate(curves.values()):
        places, color = [at(*p) for p in curve], COLORS[n % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in places]
    return out


def _round_up(x: float) -> float:
    """The next of 1, 2, 4, 10 times a power of ten, four parts of which read well."""
    power = 10.0 ** math.floor(math.log10(max(x, 1e-9)))
    return next(step * power for step in (1, 2, 4, 10) if step * power >= x)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    p.add_argument("files", nargs="+", type=Path)
    p.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = p.parse_args(argv)
    rows: dict[str, list[Figures]] = {}
    for file in args.files:
        for kind, found in json.loads(file.read_text()).items():
            rows.setdefault(kind, []).extend(found)
    args.out.write_text(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
