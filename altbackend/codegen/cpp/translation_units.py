"""Print the C++ text of a graph's kernels; long texts as several translation units that compile in parallel.

A compiler takes about a second for ten thousand characters of kernels, on one core. There is one text: without macros
it is the complete library, and with `-DALT_UNITS=4 -DALT_UNIT=1` the second quarter of its parts (`kernel.h`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...runtime.isa import PIECE

HEADER = "#include <altbackend/kernel.h>\n"
LIBRARY_HEADER = "#include <altbackend/aot/parallel.h>\n"
ATTENTION_HEADER = "#include <altbackend/attention.h>\n"
LONG = 12000  # characters from which a text is divided
SHORTEST_PART = 6000  # characters; every part compiles the headers once more


def unit(kernels: Sequence[str], segments: Sequence[str], namespace: str = "") -> str:
    """Return the text of functions `static void ...`, and of the segments, which call them.

    `namespace`: that of a program in an ahead-of-time library, whose kernels run on torch's threads.
    """
    header = [LIBRARY_HEADER] if namespace else [HEADER]
    header += [ATTENTION_HEADER] * any("alt::attention::" in k for k in kernels)
    header += [f"namespace {namespace} {{\n"] if namespace else []
    end = [f"}}  // namespace {namespace}\n"] if namespace else []
    if sum(map(len, (*kernels, *segments))) < LONG:
        return "\n".join([*header, *kernels, *segments, *end])
    kernels = [k.replace("static void", "ALT_KERNEL", 1) for k in kernels]
    declarations = [k[: k.index(")")] + ");" for k in kernels]
    guarded = [f"{PIECE}{n})\n{text}\n#endif" for n, text in enumerate(_parts([*kernels, *segments]))]
    return "\n".join([*header, *declarations, "", *guarded, "", *end])


def _parts(functions: Iterable[str]) -> list[str]:
    """Join functions to parts of at least SHORTEST_PART characters."""
    parts: list[str] = []
    last: list[str] = []
    for text in functions:
        last.append(text)
        if sum(map(len, last)) >= SHORTEST_PART:
            parts.append("\n".join(last))
            last = []
    return parts + (["\n".join(last)] if last else [])
