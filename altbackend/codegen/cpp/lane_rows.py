"""Run short rows side by side: the lanes of a vector are rows, and a loop along the rows is a loop over vectors.

A row of 21 numbers fills no vectors, and its logarithm is one number: a log-softmax of such rows took 62 ns a row. The
rows of a group are turned over into columns, so that lane k of vector i is element i of row k; results are turned back.
The last group begins where it ends with the last row, and computes rows of the group before it once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value
from .ast import Declare, Function, Let, Loop, Stmt, Store, Transpose, Update, name
from .positions import loads, row_variable

LONGEST = 32  # elements of a row; rows of two vectors and more fill them, except in loops that run in order
COSTLY = 8  # float additions of an element
FEWEST_GROUPS = 4
WIDEST = 8  # bytes of an element that is turned over
ONE_LANE = 16  # float32 numbers that one lane may add up before float64 takes over


@dataclass
class _Lanes:
    """A function being rewritten: `names` of the row become arrays of one element for each lane.

    `number`: the row of a lane. `group`: the first row of a group; None where lanes beyond the last row repeat it.
    """

    row: Atom
    lane: Atom
    count: int
    number: Index
    group: Index | None
    scratch: dict[str, Declare]
    names: dict[str, torch.dtype] = field(default_factory=dict)
    columns: dict[Value, str] = field(default_factory=dict)
    read: list[Stmt] = field(default_factory=list)
    written: list[Stmt] = field(default_factory=list)

    def array(self, label: str, dtype: torch.dtype, size: int = 1) -> str:
        """Declare an array of `size` elements for each lane."""
        self.scratch[label] = Declare(label, dtype, None, size * self.count)
        return label

    def at(self, index: Index) -> Index:
        """Return the position of a lane's element in an array."""
        return ex.add(ex.mul(index, self.count), ex.ix(self.lane))

    def stride(self, index: Index, v: Atom, dtype: torch.dtype) -> int | None:
        """Return the elements between rows of neighbours along `v`; None where groups are not turned over."""
        if self.group is None:
            return None
        step = ex.coefficient(index, self.row)
        is_turned = isinstance(step, int) and ex.coefficient(index, v) == 1 and dtype.itemsize <= WIDEST
        return step if is_turned and isinstance(step, int) else None

    def first(self, index: Index, v: Atom) -> Index:
        """Return the position in memory of the first element of a group."""
        assert self.group is not None
        return ex.substitute(index, {self.row: self.group, v: 0})

    def absolute(self, index: Index) -> Index:
        """Return a position in memory with the lane's row for the row."""
        return ex.substitute(index, {self.row: self.number})


def with_rows_in_lanes(f: Function, lanes: int, in_place: Mapping[str, str]) -> Function:
    """Return `f` with `lanes` short rows side by side, if its rows are short and contiguous.

    `in_place`: parameters that reuse the memory of others.
    """
    if f.flat is not None or f.short or f.row_counters or f.template or f.partials or f.checks:
        return f
    row, rows = row_variable(f.body), f.rows
    if row is None or not isinstance(rows, int) or rows < FEWEST_GROUPS * lanes or not _suits(f, row, lanes):
        return f
    groups = -(-rows // lanes)
    lane = ex.var("k", lanes)
    first = ex.mul(ex.ix(ex.var("o", groups)), lanes)
    number, group = ex.add(first, ex.ix(lane)), first
    is_overwritten = bool(in_place) or any(p.shared for p in f.params)
    if rows % lanes and is_overwritten:  # no row is computed twice
        number = ex.minimum(number, rows - 1)
    elif rows % lanes:
        group = ex.minimum(first, rows - lanes)
        number = ex.add(group, ex.ix(lane))
    arrays = {d.name: replace(d, numel=ex.mul(d.numel or 1, lanes)) for d in f.scratch}
    state = _Lanes(row, lane, lanes, number, None if rows % lanes and is_overwritten else group, arrays)
    body = _row_statements(f.body, state)
    return replace(f, rows=groups, body=(*state.read, *body, *state.written), scratch=tuple(state.scratch.values()))


def _suits(f: Function, row: Atom, lanes: int) -> bool:
    """Return whether rows are short, their statements simple, and their positions linear; some row is reduced."""
    scratch = {d.name for d in f.scratch}
    loops = [s for s in f.body if isinstance(s, Loop)]
    if not _gains(loops, lanes):
        return False
    sizes = {ex.size_of(s.var) for s in loops}
    if not loops or not all(isinstance(n, int) and 1 < n <= LONGEST for n in sizes):
        return False
    if not any(isinstance(x, Update) for s in loops for x in s.body) or any(d.init is not None for d in f.scratch):
        return False
    if any((s.begin, s.end, s.step) != ("0", "", 1) or s.limit is not None for s in loops):
        return False
    inner = [x for s in loops for x in s.body]
    outer = [x for x in f.body if not isinstance(x, Loop)]
    if not all(_is_plain(x, scratch) for x in (*inner, *outer)) or any(isinstance(x, Declare) for x in inner):
        return False
    every = (*inner, *outer)
    stored = {x.target for x in every if isinstance(x, Store)} - scratch
    read = [v for x in every for v in loads(x)]
    if any(v.attr[0] in stored for v in read):  # columns of what a row reads are copied before it is written
        return False
    places = [v.attr[1] for v in read if v.attr[0] not in scratch]
    places += [x.index for x in every if isinstance(x, Store) and x.target in stored and x.index is not None]
    return all(_is_linear(e, row) for e in places)


def _gains(loops: Sequence[Loop], lanes: int) -> bool:
    """Return whether rows one by one are slow: a loop runs in order, or its iterations fill too few vectors.

    Costly terms and maxima are slow in less than two vectors. Cheap sums are slow in at most one vector, if there are
    two of them or their numbers have 16 bits.
    """
    if not all(s.simd for s in loops):
        return True
    n = max((ex.bounds(ex.size_of(s.var))[1] for s in loops), default=0)
    values = [x.value for s in loops for x in s.body if isinstance(x, (Let, Store, Update))]
    slow = any(op != "sum" for s in loops for op, _ in s.sums) or sum(map(va.flops, values)) >= COSTLY
    sums = sum(len(s.sums) for s in loops)
    return n < 2 * lanes if slow else n <= lanes and (sums > 1 or any(v.dtype.itemsize == 2 for v in values))


def _is_plain(x: Stmt, scratch: set[str]) -> bool:
    match x:
        case Let():
            return not any(v.op in ("masked", "wrap_index", "nonzero", "row_total") for v in va.walk(x.value))
        case Declare():
            return x.numel is None and x.init is not None
        case Update():
            return not x.guards and (x.index is None or x.target in scratch)
        case Store():
            return not x.guards and x.index is not None
    return False


def _is_linear(e: Index, row: Atom) -> bool:
    step = ex.coefficient(e, row)
    return isinstance(step, int) and not ex.lookups(e)


def _row_statements(body: Sequence[Stmt], state: _Lanes) -> list[Stmt]:
    """Return the statements of a row in loops over the lanes."""
    out: list[Stmt] = []
    run: list[Stmt] = []

    def close() -> None:
        if run:
            out.append(Loop(state.lane, "0", "", tuple(run), simd=True))
            run.clear()

    for s in body:
        if isinstance(s, Loop):
            close()
            inner = tuple(x for statement in s.body for x in _statement(statement, state, s.var))
            out.append(Loop(s.var, "0", "", (Loop(state.lane, "0", "", inner, simd=True),)))
        elif isinstance(s, Declare):
            assert s.init is not None
            dtype = torch.float64 if s.dtype == torch.float32 and _is_long(body, s.name) else s.dtype
            state.names[s.name] = dtype
            init = va.const(s.init.attr, dtype) if s.init.op == "const" else _value(s.init, state, None)
            run.append(Store(state.array(f"{s.name}_k", dtype), state.at(0), init))
        elif isinstance(s, Let):
            if s.value.op == "load":
                close()
            run += _statement(s, state, None)
            state.names[s.name] = s.value.dtype
            run.append(Store(state.array(f"{s.name}_k", s.value.dtype), state.at(0), name(s.name, s.value.dtype)))
            if s.value.op == "load":  # lanes may read at no fixed stride, which must not keep the rest from vectors
                close()
        else:
            close()
            out.append(Loop(state.lane, "0", "", tuple(_statement(s, state, None))))
    close()
    return out


def _is_long(body: Sequence[Stmt], label: str) -> bool:
    """Return whether more numbers are added to a scalar than float32 may hold in one lane."""
    sums = [s for s in body if isinstance(s, Loop) and any(_adds(x, label) for x in s.body)]
    return any(ex.bounds(ex.size_of(s.var))[1] > ONE_LANE for s in sums)


def _adds(x: Stmt, label: str) -> bool:
    return isinstance(x, Update) and x.target == label and x.op == "sum"


def _statement(s: Stmt, state: _Lanes, v: Atom | None) -> list[Stmt]:
    """Return a statement of a row, in a loop over `v` if it is in one, for one lane."""
    assert isinstance(s, (Let, Update, Store))
    value = _value(s.value, state, v)
    if isinstance(s, Let):
        return [replace(s, value=value)]
    if isinstance(s, Update):
        if s.index is not None:
            return [replace(s, index=state.at(s.index), value=value)]
        dtype = state.names[s.target]
        return [
            Update(
                f"{s.target}_k", state.at(0), s.op, value if value.dtype == dtype else va.make("cast", (value,), dtype)
            )
        ]
    assert s.index is not None
    if s.target in state.scratch:
        return [replace(s, index=state.at(s.index), value=value)]
    if v is None or v not in ex.vars_of(s.index):
        return [replace(s, index=state.absolute(s.index), value=value)]
    n = ex.size_of(v)
    assert isinstance(n, int)
    column = state.array(f"c{len(state.scratch)}", value.dtype, n)
    if (stride := state.stride(s.index, v, value.dtype)) is not None:
        first = state.first(s.index, v)
        state.written.append(Transpose(column, 0, state.count, s.target, first, stride, n, state.count))
    else:
        back = Store(s.target, state.absolute(s.index), va.load(column, state.at(ex.ix(v)), value.dtype))
        state.written.append(Loop(state.lane, "0", "", (Loop(v, "0", "", (back,)),)))
    return [Store(column, state.at(ex.ix(v)), value)]


def _value(x: Value, state: _Lanes, v: Atom | None) -> Value:
    if x.op == "name" and x.attr in state.names:
        dtype = state.names[x.attr]
        lane_value = va.load(f"{x.attr}_k", state.at(0), dtype)
        return lane_value if dtype == x.dtype else va.make("cast", (lane_value,), x.dtype)
    if x.op == "load":
        return _load(x, state, v)
    if x.op == "index":
        return va.make("index", (), x.dtype, state.absolute(x.attr))
    if not x.args:
        return x
    return va.make(x.op, tuple(_value(a, state, v) for a in x.args), x.dtype, x.attr)


def _load(x: Value, state: _Lanes, v: Atom | None) -> Value:
    source, index = x.attr
    if source in state.scratch:
        return va.load(source, state.at(index), x.dtype)
    if v is None or not {v, state.row} <= ex.vars_of(index):
        return va.load(source, state.absolute(index), x.dtype)
    if x not in state.columns:
        n = ex.size_of(v)
        assert isinstance(n, int)
        column = state.columns[x] = state.array(f"c{len(state.scratch)}", x.dtype, n)
        if (stride := state.stride(index, v, x.dtype)) is not None:
            state.read.append(Transpose(source, state.first(index, v), stride, column, 0, state.count, state.count, n))
        else:
            there = Store(column, state.at(ex.ix(v)), va.load(source, state.absolute(index), x.dtype))
            state.read.append(Loop(state.lane, "0", "", (Loop(v, "0", "", (there,)),)))
    return va.load(state.columns[x], state.at(ex.ix(v)), x.dtype)
