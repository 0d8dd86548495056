"""The state of a CPU kernel under construction: its parameters, its locals, and the loops around a statement."""

from __future__ import annotations

from dataclasses import field

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir.expr import Atom, Index
from ...ir.loops import Program
from ...ir.value import Value
from ...schedule.kernel import Kernel, Stage
from .ast import Declare, Param, Partial, Stmt


@dataclass
class Scope:
    """One stage being emitted: statements before and after the loop at each level.

    `bound`: names of values. `forwarded`: values of buffers in registers. `sums`: reductions of the innermost loop.
    `serial`: the innermost loop is not vectorised. `blocked`: (float64 total, float32 sum) pairs. `columns`: statements
    before and after each block of a loop over rows.
    """

    stage: Stage
    before: list[list[Stmt]]
    after: list[list[Stmt]]
    bound: dict[Value, Value] = field(default_factory=dict)
    forwarded: dict[str, Value] = field(default_factory=dict)
    sums: list[tuple[str, str]] = field(default_factory=list)
    serial: bool = False
    blocked: list[tuple[str, str]] = field(default_factory=list)
    columns: list[tuple[Stmt, Stmt]] = field(default_factory=list)


@dataclass
class Emitter:
    """The state of emitting one kernel.

    `levels`: the loop level of names. `scalars`: values of the row by buffer. `ready`: buffers of earlier stages.
    `stream`: elements from which a row exceeds L1. `sum_block`: elements of a float32 sum in all lanes of a vector,
    before it is added to a float64 total. `exact`: no reciprocals. `checks`: some position is checked.
    """

    program: Program
    kernel: Kernel
    params: dict[str, Param] = field(default_factory=dict)
    scratch: dict[str, Declare] = field(default_factory=dict)
    partials: list[Partial] = field(default_factory=list)
    row: list[Stmt] = field(default_factory=list)
    row_names: dict[Value, Value] = field(default_factory=dict)
    levels: dict[Value, int] = field(default_factory=dict)
    scalars: dict[str, Value] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    symbols: set[Atom] = field(default_factory=set)
    counter: int = 0
    checks: bool = False
    stream: int = 0
    sum_block: int = 256
    exact: bool = False

    def fresh(self, prefix: str) -> str:
        """Return a new name."""
        self.counter += 1
        return f"{prefix}{self.counter - 1}"

    def param(self, buffer: str, written: bool = False) -> str:
        """Return the parameter that stands for a buffer."""
        old = self.params.get(buffer)
        if old is None or (written and not old.written):
            label = old.name if old else f"p{len(self.params)}"
            self.params[buffer] = Param(label, self.program.buffers[buffer].dtype, written)
        return self.params[buffer].name

    def note(self, e: Index) -> None:
        """Enter the symbols of an index, which become arguments."""
        self.symbols.update(ex.syms_of(e))


def scratch(e: Emitter, b: str, numel: Index) -> str:
    """Return the name of the memory that holds a buffer for one row; it is declared with the first use."""
    if b not in e.scratch:
        e.scratch[b] = Declare(e.fresh("w"), e.program.buffers[b].dtype, None, numel)
    return e.scratch[b].name


def known_at_most(size: Index, limit: int) -> bool:
    """Return whether a size is a number up to a limit."""
    return isinstance(size, int) and size <= limit
