"""The conditions around a load: where memory may be read only if they hold."""

from __future__ import annotations

from ...ir import expr as ex
from ...ir import value as va
from ...ir.loops import Program
from ...ir.value import Value
from ...schedule.tiling.gpu.program_rows import PROGRAM


def is_within(program: Program, load: Value) -> bool:
    """Return whether a load is within its buffer at every position, whatever the conditions around it say."""
    buffer, index = load.attr
    (low, high), (least, _) = ex.bounds(index), ex.bounds(program.buffers[buffer].extent)
    return not ex.lookups(index) and low >= 0 and high < least


def needed(v: Value, conds: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the conditions where alone `v` may be read.

    What does not vary with the positions of a condition is read anyway, if the condition holds for some of them,
    whatever the other conditions say.
    """
    return tuple(
        c
        for c in conds
        if not (_holds_somewhere(c) and _is_independent(v, c) and all(d is c or _is_independent(d, c) for d in conds))
    )


def _is_independent(v: Value, cond: Value) -> bool:
    """Return whether a value varies with no position of a condition; the program's number is a part of `x`."""
    if not v.vars.isdisjoint(cond.vars):
        return False
    return all(a.key != "x" for a in cond.vars) or not any(_reads_program(x) for x in va.walk(v))


def _reads_program(v: Value) -> bool:
    index = v.attr[1] if v.op == "load" else v.attr if v.op == "index" else 0
    return not ex.syms_of(PROGRAM).isdisjoint(ex.syms_of(index))


def _holds_somewhere(cond: Value) -> bool:
    """Return whether a comparison of positions surely holds for some of them.

    One that depends on symbols, such as sizes or the number of the program, may hold nowhere.
    """
    if cond.op not in ("lt", "ge") or any(a.op not in ("index", "const") for a in cond.args):
        return False
    indices = [a.attr for a in cond.args if a.op == "index"]
    sizes = [ex.size_of(v) for i in indices for v in ex.vars_of(i)]
    if any(ex.syms_of(i) for i in indices) or not all(isinstance(n, int) for n in sizes):
        return False
    left, right = (ex.bounds(a.attr) if a.op == "index" else (a.attr, a.attr) for a in cond.args)
    return left[0] < right[0] if cond.op == "lt" else left[1] >= right[1]
