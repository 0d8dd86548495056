"""Give kernels that differ in sizes alone one function, which takes these sizes as arguments.

A compiler takes 20 to 50 ms for a kernel, and a network repeats a few structures: 26 kernels of MobileNetV3-Large
become 10. A kernel that shares its structure with no other one keeps its sizes as constants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from altbackend.lazy_dataclass import dataclass

NAME = "@"  # stands for the name of a kernel in its text
# Iterations of a loop from which its length may be an argument. The compiler unrolls shorter ones. With accumulators in
# memory a loop over 72 or 120 columns takes 12 % longer, one over 480 takes 3 %.
SHORTEST = 64
SHORTEST_OF_TOTALS = 256

# Rows or elements that threads share, columns, accumulators of a thread, and elements of a row. Steps between
# neighbours in a loop stay constants, since vectors of elements depend on them, and so do divisors.
_SIZE = re.compile(
    r"(?<=alt::share\()\d+(?=, thread,)|(?<=alt::share_blocks\()\d+(?=, 64, thread,)"
    r"|(?<= < )\d+(?=; \+\+)|(?<=_pitch = \()\d+(?= \+ )|(?<=[\[ ])\d+(?= \* o\b)"
)
_LENGTH = re.compile(r" < (\d+); \+\+")
_PARAMETERS = "const int max_threads"


@dataclass(frozen=True)
class Shared:
    """The text of a function, and the sizes that a call of it passes before the number of threads."""

    text: str
    sizes: tuple[str, ...] = ()


def share(texts: Sequence[str]) -> Mapping[str, Shared]:
    """Return the function of each kernel, whose name is `@`. Kernels of one structure have one function."""
    groups: dict[str, dict[str, None]] = {}
    for text in texts:
        structure = _SIZE.sub("#", text) if _may_share(text) else text
        groups.setdefault(structure, {})[text] = None
    return {text: f for group in groups.values() for text, f in _functions([*group]).items()}


def _may_share(text: str) -> bool:
    """Return whether arguments in place of constants neither slow a kernel down nor change its results.

    The compiler divides the terms of a total by the number of iterations, which decides how they round.
    """
    shortest = SHORTEST_OF_TOTALS if "_pitch = " in text else SHORTEST
    return " reduction(" not in text and all(int(n) >= shortest for n in _LENGTH.findall(text))


def _functions(texts: Sequence[str]) -> dict[str, Shared]:
    """Return the functions of kernels of one structure."""
    columns = list(zip(*(_SIZE.findall(text) for text in texts), strict=True)) if len(texts) > 1 else []
    names: dict[tuple[str, ...], str] = {}
    for column in columns:
        if len(set(column)) > 1:
            names.setdefault(column, f"size{len(names)}")
    if not names:
        return {text: Shared(text) for text in texts}
    spelled = iter([names.get(column, column[0]) for column in columns])
    parameters = "".join(f"const int64_t {name}, " for name in names.values())
    shared = _SIZE.sub(lambda _: next(spelled), texts[0]).replace(_PARAMETERS, parameters + _PARAMETERS, 1)
    return {text: Shared(shared, tuple(column[n] for column in names)) for n, text in enumerate(texts)}
