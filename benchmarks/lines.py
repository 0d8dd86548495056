"""Lines over a common axis as an SVG, by the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.curves import COLORS

WIDTH, HEIGHT, MARGIN, KEY = 640, 320, 56, 18


def picture_of_lines(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Return the SVG text. Later lines are dashed, so that those below them show where they coincide."""
    points = [p for line in lines.values() for p in line]
    right, top = max(x for x, _ in points), max(y for _, y in points) * 1.05
    total = HEIGHT + 2 * MARGIN + KEY * len(lines)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" height="{total}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({MARGIN},{MARGIN})">',
        f'<text x="0" y="-12">{escape(up)}</text>',
        f'<text x="{WIDTH}" y="{HEIGHT + 34}" text-anchor="end">{escape(across)}</text>',
    ]
    for k in range(1, 5):
        y = HEIGHT * (1 - k / 4)
        out.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{top * k / 4:.3g}</text>')
        out.append(f'<text x="{WIDTH * k / 4:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{right * k / 4:.3g}</text>')
    out.append(f'<path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#444"/>')
    for n, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{x / right * WIDTH:.1f},{HEIGHT - y / top * HEIGHT:.1f}" for x, y in line)
        style = f'stroke="{COLORS[n % len(COLORS)]}" stroke-width="2"' + (f' stroke-dasharray="{4 + n},6"' if n else "")
        out.append(f'<polyline points="{path}" fill="none" {style}/>')
        y = HEIGHT + 48 + KEY * n
        out.append(
            f'<line x1="0" x2="24" y1="{y - 4}" y2="{y - 4}" {style}/><text x="30" y="{y}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</g>", "</svg>", ""])
