"""The state of emitting one kernel as tiles: its scopes, and tables of what was emitted."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from functools import cached_property

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Program
from ...ir.value import Value
from ...schedule.kernel import Kernel
from ...schedule.loop_mapping import MappedNode
from ...schedule.rows import some_rows_are_neighbours
from ...schedule.tiling.gpu.blocks import Blocks
from ...schedule.tiling.gpu.program_rows import PROGRAM
from ...schedule.tiling.gpu.tiled import TiledKernel
from ..cpp.ast import Param
from .tile_ast import Points, TileStmt, Total


@dataclass
class Scope:
    """Statements of one level; `axis` is the axis that its loop runs along."""

    parent: Scope | None = None
    axis: str = ""
    body: list[TileStmt] = field(default_factory=list)
    bound: dict[tuple[Value, tuple[Value, ...]], Value] = field(default_factory=dict)
    quads: set[str] = field(default_factory=set)


@dataclass
class Emitter:
    """The state of emitting one kernel.

    Three tables go by buffer:

    - `params`: the parameters;
    - `writers`: the nodes emitted so far;
    - `results`: values that later nodes read.

    Tables by name, axis or position:

    - `guards`: for each checked position, the name that says whether it is in range;
    - `masks`: for each axis, the name of its mask;
    - `axes`: the tile axes of each name;
    - `rows`: the axis of each row length;
    - `points`: definitions of axes;
    - `zeros`: masks outside of which a named tile is 0, as masked loads are;
    - `normalisers`: sums of online softmaxes.

    `last_reads`: buffers that no later pass reads. `passed`: scans whose pass over a long row has ended.
    `binding_chain`: nodes are bound in order, without recursion.
    """

    program: Program
    tiled: TiledKernel
    params: dict[str, Param] = field(default_factory=dict)
    writers: dict[str, MappedNode] = field(default_factory=dict)
    results: dict[str, Value] = field(default_factory=dict)
    guards: dict[Value, Value] = field(default_factory=dict)
    masks: dict[Atom, str] = field(default_factory=dict)
    axes: dict[Value, frozenset[str]] = field(default_factory=dict)
    rows: dict[Index, Atom] = field(default_factory=dict)
    points: dict[str, tuple[Scope, Points]] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)
    symbols: set[Atom] = field(default_factory=set)
    counter: dict[str, int] = field(default_factory=dict)
    checks: bool = False
    normalisers: set[Value] = field(default_factory=set)
    last_reads: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    binding_chain: bool = False
    zeros: dict[Value, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def windows(self) -> frozenset[str]:
        """Return the buffers of which a point reads more than two elements."""
        counts = (Counter(b for b, _ in va.loads(q.value)) for q in self.kernel.nodes)
        return frozenset(b for count in counts for b, n in count.items() if n > 2)

    @cached_property
    def rows_are_neighbours(self) -> bool:
        """Return whether memory is contiguous from row to row for an operand or a result."""
        return some_rows_are_neighbours(self.kernel.nodes, self.kernel.stored)

    @cached_property
    def read_in_parts(self) -> frozenset[str]:
        """Return the buffers of which loops of different lengths read the same rows, as a gate behind a total does."""
        lengths: dict[str, set[Index]] = {}
        for q in self.kernel.nodes:
            for b, index in va.loads(q.value):
                if q.points != 1 and q.row in ex.vars_of(index):
                    lengths.setdefault(b, set()).add(q.points)
        return frozenset(b for b, points in lengths.items() if len(points) > 1)

    @property
    def kernel(self) -> Kernel:
        """Return the kernel that is emitted."""
        return self.tiled.kernel

    @property
    def blocks(self) -> Blocks:
        """Return the kernel's blocks."""
        return self.tiled.blocks

    def fresh(self, prefix: str) -> str:
        """Return a new name."""
        n = self.counter[prefix] = self.counter.get(prefix, -1) + 1
        return f"{prefix}{n}"

    def param(self, buffer: str) -> str:
        """Return the parameter that stands for a buffer."""
        if buffer not in self.params:
            written = any(q.node.out == buffer for q in self.kernel.nodes)
            label = self.fresh("out" if written else "in")
            self.params[buffer] = Param(label, self.program.buffers[buffer].dtype, written)
        return self.params[buffer].name

    def note(self, *indices: Index) -> None:
        """Enter the symbols of indices, which become arguments."""
        for e in indices:
            self.symbols.update(ex.syms_of(e) - ex.syms_of(PROGRAM))

    def define_axis(self, scope: Scope, points: Points) -> None:
        """Define the positions of an axis; the last definition of a name is valid."""
        scope.body.append(points)
        self.points[points.name] = scope, points
