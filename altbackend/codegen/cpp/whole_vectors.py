"""Run short vector loops in whole vectors: the last one begins where it ends with the loop, over elements done before.

A vector loop computes the iterations that fill no vector one by one. Of 24 elements, those are the last 8: their
exponentials and logarithms took three times as long as those of the other 16. A loop that reads nothing it writes
computes the same values a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...ir import expr as ex
from ...ir import value as va
from .ast import Function, Let, Loop, Stmt, Store

COSTLY = 8  # float additions of an iteration that costs less when computed twice in vectors than once alone
MOST_VECTORS = 16  # vectors of a loop; beside more of them, iterations that fill none take little time
FEWEST_LANES = 8


def with_whole_vectors(f: Function, lanes: int, in_place: Mapping[str, str]) -> Function:
    """Return `f` with costly short vector loops in whole vectors of `lanes` float32 numbers.

    `in_place`: for each stored parameter that may reuse the memory of another one, that parameter.
    """
    return f if f.flat is not None else replace(f, body=_statements(f.body, lanes, in_place))


def _statements(body: Sequence[Stmt], lanes: int, in_place: Mapping[str, str]) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in body:
        if not isinstance(s, Loop):
            out.append(s)
        elif (width := _width(s, lanes)) and _repeats(s, in_place):
            out.append(replace(s, vector=width))
        else:
            out.append(replace(s, body=_statements(s.body, lanes, in_place)))
    return tuple(out)


def _width(s: Loop, lanes: int) -> int:
    """Return the iterations of the loop's vectors, where some fill none; else 0."""
    n = ex.size_of(s.var)
    if not (s.simd and not s.sums and s.step == 1 and s.limit is None and (s.begin, s.end) == ("0", "")):
        return 0
    values = [x.value for x in s.body if isinstance(x, (Let, Store))]
    if not isinstance(n, int) or sum(map(va.flops, values)) < COSTLY:
        return 0
    sizes = [v.dtype.itemsize for v in values if v.op != "const" and (v.dtype != torch.bool or v.op == "load")]
    narrowest = min(sizes, default=4)  # booleans that are not in memory are bits of a mask
    width = lanes * max(4 // narrowest, 1)
    if n > width * MOST_VECTORS:
        return 0
    while width > n:
        width //= 2
    return width if width >= FEWEST_LANES and n % width else 0


def _repeats(s: Loop, in_place: Mapping[str, str]) -> bool:
    """Return whether iterations may run twice: they read nothing that the loop writes, and update nothing.

    Reads at a stride need iterations after a vector of the compiler's, which reads beyond its last element.
    """
    if not all(isinstance(x, (Let, Store)) for x in s.body):
        return False
    stores = [x for x in s.body if isinstance(x, Store)]
    loads = [v for x in s.body if isinstance(x, (Let, Store)) for v in va.walk(x.value) if v.op == "load"]
    if any(ex.coefficient(v.attr[1], s.var) not in (0, 1) for v in loads):
        return False
    whole = all(x.index is not None and not x.guards and ex.coefficient(x.index, s.var) == 1 for x in stores)
    written = {x.target for x in stores}
    return whole and (written | {in_place.get(t, t) for t in written}).isdisjoint(v.attr[0] for v in loads)
