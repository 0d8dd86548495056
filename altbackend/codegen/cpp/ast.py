"""The kernel AST of a CPU, which the C++ printer spells. Scalars are `ir.value` nodes whose operands are names.

A name is a Value of op "name" (attr: the identifier). Every statement is a frozen dataclass.
"""

from __future__ import annotations

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value


@dataclass(frozen=True)
class Let:
    """`const T name = value;`"""

    name: str
    value: Value


@dataclass(frozen=True)
class Declare:
    """A mutable scalar, or with `numel` an array, set to `init`."""

    name: str
    dtype: torch.dtype
    init: Value | None
    numel: Index | None = None


@dataclass(frozen=True)
class Store:
    """`target[index] = value`, or `target = value` without an index; with `guards`, only if all of these hold."""

    target: str
    index: Index | None
    value: Value
    guards: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Update:
    """`target[index] = target[index] op value`; with `guards`, only if all of these hold."""

    target: str
    index: Index | None
    op: str
    value: Value
    guards: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Loop:
    """`for var in [begin, end)`; `simd`: iterations are independent but for `sums` (op, name) reductions.

    `step` > 1 makes a blocked loop whose body contains the loop over the block. `limit`: iterations of a last block,
    which may have fewer than `var`. `vector`: run so many iterations at a time, the last ones over some done before.
    `scalar`: the compiler must not vectorise the loop.
    """

    var: Atom
    begin: str
    end: str
    body: tuple[Stmt, ...]
    simd: bool = False
    sums: tuple[tuple[str, str], ...] = ()
    step: int = 1
    limit: Index | None = None
    vector: int = 0
    scalar: bool = False


@dataclass(frozen=True)
class BlockRow:
    """`name` points at this row's part of `block`, which holds `rows` rows of one element for each value of `var`.

    The parts begin `pitch` elements apart. Positions in memory are linear in the row's number between multiples of
    `period`, so that no block crosses one.
    """

    name: str
    block: str
    dtype: torch.dtype
    var: Atom
    rows: int
    period: int
    pitch: int


@dataclass(frozen=True)
class BlockRead:
    """At the first row of a block, fill it with what its rows load by `source`: neighbours for neighbouring rows."""

    row: BlockRow
    source: Value


@dataclass(frozen=True)
class BlockWrite:
    """At the last row of a block, copy it to `target`, where `index` is the position of this row's element at `var`."""

    row: BlockRow
    target: str
    index: Index


@dataclass(frozen=True)
class Transpose:
    """Turn a part of `source` over: `target[at + k * pitch + i]` is `source[first + i * stride + k]`.

    i is below `lines` and k below `count`.
    """

    source: str
    first: Index
    stride: Index
    target: str
    at: Index
    pitch: Index
    lines: Index
    count: Index


PARALLEL, CLOSE = "parallel {", "} parallel"  # lines of a template that open and close such a block

Stmt = Let | Declare | Store | Update | Loop | BlockRow | BlockRead | BlockWrite | Transpose


@dataclass(frozen=True)
class Param:
    """A buffer argument. `written`: not const. `shared`: another argument has the same storage."""

    name: str
    dtype: torch.dtype
    written: bool
    shared: bool = False


@dataclass(frozen=True)
class Partial:
    """Accumulators of a reduction over rows: `numel` elements of each thread, combined by `op` after the last row.

    `parallel`: the loops over results. Result number `slot` is stored at `index` of `target`.
    """

    name: str
    dtype: torch.dtype
    numel: Index
    op: str
    init: Value
    parallel: tuple[Atom, ...]
    slot: Index
    target: str
    index: Index


@dataclass(frozen=True)
class Function:
    """One kernel over `rows` rows, or over the single loop `flat`.

    `short`: another body for rows whose only loop has few iterations in a call; its vectors run across rows.
    `row_counters`: variables of the rows' loops, slowest first, which count with the row's number `o`. `template`: the
    function as lines of C++ in place of rows and body; PARALLEL opens a block that every `thread` of a `team` runs.
    """

    params: tuple[Param, ...]
    symbols: tuple[str, ...]
    rows: Index
    flat: Atom | None
    scratch: tuple[Declare, ...]
    body: tuple[Stmt, ...]
    partials: tuple[Partial, ...]
    work: Index
    checks: bool
    short: tuple[Stmt, ...] = ()
    row_counters: tuple[Atom, ...] = ()
    template: tuple[str, ...] = ()


def name(identifier: str, dtype: torch.dtype) -> Value:
    """Return a value that is a variable of the generated code."""
    return va.make("name", (), dtype, identifier)
