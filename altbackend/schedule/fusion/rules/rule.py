"""The form of a fusion rule: a name and a check that gives a refusal or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Generic, TypeVar

from altbackend.lazy_dataclass import dataclass

from ....ir import value as va
from ....ir.expr import Index
from ...access import reads_same_point, same_point
from ...loop_mapping import Kind, MappedNode, Refusal
from ...rows import rows_are_neighbours
from ..group import Fusion, Group

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One row of a table: `check` returns a refusal where the rule forbids a kernel."""

    name: str
    check: Callable[[Fusion, Subject], Refusal | None]


@dataclass(frozen=True)
class Proposal:
    """A group whose nodes are all mapped. `new`: positions of the nodes that were mapped for this proposal."""

    group: Group
    new: tuple[int, ...]

    @property
    def mapped(self) -> tuple[MappedNode, ...]:
        """Return the mapped nodes in program order."""
        return self.group.mapped

    @cached_property
    def rows_are_neighbours(self) -> bool:
        """Return whether memory is contiguous from row to row, and not along rows (`rows.rows_are_neighbours`)."""
        return rows_are_neighbours(self.mapped)

    def edges(self) -> Iterator[Edge]:
        """Yield every read by a new node of a buffer that an earlier node of the group writes."""
        for n in self.new:
            reader = self.mapped[n]
            for buffer, index in va.loads(reader.value):
                for writer in self.mapped[:n]:
                    if writer.node.out == buffer:
                        yield Edge(writer, reader, buffer, index, self.group.rows)


@dataclass(frozen=True)
class Edge:
    """A read of `buffer` at `index` by `reader`; `writer` is an earlier node of the same kernel of `rows` rows."""

    writer: MappedNode
    reader: MappedNode
    buffer: str
    index: Index
    rows: Index

    @cached_property
    def at_same_point(self) -> bool:
        """Return whether the reader uses at each point just what the writer computed there."""
        return same_point(self.writer, self.reader)

    @cached_property
    def at_scanned_point(self) -> bool:
        """Return whether the reader uses at each point what a scan along the same loops has reached there."""
        writer, reader = self.writer, self.reader
        alike = writer.kind is Kind.SCAN and writer.sizes == reader.sizes
        return alike and reads_same_point(writer, reader, self.buffer)


@dataclass(frozen=True)
class Table:
    """The rules of one kind of device, by what they judge.

    `nodes`: groups before their nodes are mapped. `mapping`: groups with mapped nodes. `edges`: single reads.
    """

    nodes: tuple[Rule[Group], ...] = ()
    mapping: tuple[Rule[Proposal], ...] = ()
    edges: tuple[Rule[Edge], ...] = ()
