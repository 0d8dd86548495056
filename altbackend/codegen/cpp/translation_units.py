"""The translation unit of a graph's kernels; a long one in pieces that can be compiled side by side.

A compiler takes about a second for ten thousand characters of kernels, on one core. The text stays one: compiled as it
is, it is the whole library, and with `-DALT_UNITS=4 -DALT_UNIT=1` the second quarter of its pieces (`kernel.h`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...runtime.isa import PIECE

HEADER = "#include <altbackend/kernel.h>\n"
LONG = 12000  # characters from which on a text is cut
LEAST = 6000  # characters of a piece


def unit(kernels: Sequence[str], segments: Sequence[str]) -> str:
    """The text of functions `static void ...`, and of those that call them."""
    if sum(map(len, (*kernels, *segments))) < LONG:
        return "\n".join([HEADER, *kernels, *segments])
    kernels = [k.replace("static void", "ALT_KERNEL", 1) for k in kernels]
    heads = [k[: k.index(")")] + ");" for k in kernels]
    cut = [f"{PIECE}{n})\n{text}\n#endif" for n, text in enumerate(_pieces([*kernels, *segments]))]
    return "\n".join([HEADER, *heads, "", *cut, ""])


def _pieces(functions: Iterable[str]) -> list[str]:
    found: list[str] = []
    last: list[str] = []
    for text in functions:
        last.append(text)
        if sum(map(len, last)) >= LEAST:
            found.append("\n".join(last))
            last = []
    return found + (["\n".join(last)] if last else [])
