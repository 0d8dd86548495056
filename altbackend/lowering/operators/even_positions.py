"""Positions that are a fraction of one loop's variable, as of nearest-neighbour upsamplings: int(0.5 d) = d // 2.

Kernels then know which places neighbours read, instead of looking each one up.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from ...compat import torch_api
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.interp import State, evaluate
from ...ir.loops import Program
from ...ir.value import Value

MOST_COMPARED = 1 << 14  # positions of a loop that are computed while compiling
MOST_DENOMINATOR = 16  # of factors of upsamplings whose sizes are rounded
_NO_DATA = State(Program({}, (), (), ()), {})


def evenly_spaced(position: Value, size: Index) -> Index | None:
    """Return a position below `size` as a fraction of a loop's variable, rounded down; None for other positions.

    The positions of all points are computed and compared.
    """
    if len(position.vars) != 1 or position.op == "index" or position.syms or not isinstance(size, int):
        return None
    (v,) = position.vars
    n = ex.size_of(v)
    if va.loads(position) or not isinstance(n, int) or not 1 < n <= MOST_COMPARED:
        return None
    with torch_api.real_tensors():
        numbers = evaluate(position, {v: torch.arange(n)}, _NO_DATA).tolist()
    if not 0 <= min(numbers) <= max(numbers) < size:
        return None
    for ratio in (Fraction(size, n), Fraction(numbers[-1] + 1, n).limit_denominator(MOST_DENOMINATOR)):
        if numbers == [k * ratio.numerator // ratio.denominator for k in range(n)]:
            return ex.floordiv(ex.mul(ex.ix(v), ratio.numerator), ratio.denominator)
    return None
