"""Compare the elements that one mapped node writes with those that another one reads."""

from __future__ import annotations

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from .loop_mapping import Kind, MappedNode, Refusal
from .loop_refinement import common_refinement, split_loops


def same_point(writer: MappedNode, reader: MappedNode) -> bool:
    """Return whether the reader uses at each inner point just what the writer stored there."""
    return writer.kind is Kind.POINT and reads_same_point(writer, reader, writer.node.out)


def reads_same_point(writer: MappedNode, reader: MappedNode, buffer: str) -> bool:
    """Return whether every read of `buffer` is at the point that the writer stores at the same iteration."""
    if writer.inner == reader.inner and all(i is writer.index for name, i in va.loads(reader.value) if name == buffer):
        return True
    chain = common_refinement([writer.sizes, reader.sizes])
    if chain is None:
        return False
    w, r = split_loops(writer, chain), split_loops(reader, chain)
    return all(i is w.index or i == w.index for name, i in va.loads(r.value) if name == buffer)


def split_row(index: Index, row: Atom) -> tuple[Index, Index] | None:
    """Return `index` as (part of the row variable, rest); None where a term mixes both."""
    if isinstance(index, int):
        return 0, index
    row_part = ex.substitute(index, {v: 0 for v in index.vars if v is not row})
    rest = ex.sub(index, row_part)
    if row in ex.vars_of(rest):
        return None
    const = ex.substitute(row_part, {row: 0})
    if not isinstance(const, int):
        return None if ex.syms_of(const) else (row_part, rest)
    return ex.sub(row_part, const), ex.add(rest, const)


def is_dense(writer: MappedNode, position: Index) -> bool:
    """Return whether the writer stores at `position` exactly 0 .. n-1 for the n results of a row."""
    parallel = [v for v in writer.parallel if ex.size_of(v) != 1]
    strides = []
    for v in parallel:
        c = ex.coefficient(position, v)
        if c is None or ex.vars_of(c):
            return False
        strides.append((c, ex.size_of(v)))
    if ex.substitute(position, dict.fromkeys(parallel, 0)) != 0:
        return False
    expected: Index = 1
    while strides:
        step = next((x for x in strides if x[0] == expected), None)
        if step is None:
            return False
        strides.remove(step)
        expected = ex.mul(expected, step[1])
    return True


def outside_row(writer: MappedNode, reader: MappedNode, buffer: str, index: Index) -> Refusal | None:
    """Return a refusal if a row of the reader reads elements that another row of the writer stored, else None."""
    written, read = split_row(writer.index, writer.row), split_row(index, reader.row)
    if written is None or read is None:
        return Refusal(f"{buffer} is addressed by row and column together")
    if written[0] is not read[0] and written[0] != read[0]:
        return Refusal(f"{buffer} is read from other rows than it is written in")
    if not is_dense(writer, written[1]):
        return Refusal(f"{buffer} is not written densely within a row")
    if not (ex.known_nonnegative(read[1]) and ex.known_less(read[1], writer.results)):
        return Refusal(f"{buffer} is read beyond the row that writes it")
    return None
