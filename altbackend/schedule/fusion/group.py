"""Kernels under construction, and the context in which nodes are fused into them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ...config.options import Config
from ...debug.trace import DecisionKind
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Extern, Loop, Node, Program, reads, writes
from ...ir.ops import OPS
from ...ir.value import Value
from ..deps import Deps
from ..device import Device, Gpu
from ..loop_mapping import Kind, MappedNode, Refusal, fit, mappings, natural_rows
from ..products.matmul import Matmul

CACHED_COUNTS = 4096  # fusion tries a node with many kernels

# kind of decision, its subject, the verdict, the reason
Decision = Callable[[DecisionKind, str, str, str], None]


def ignore(kind: str, subject: str, verdict: str, reason: str) -> None:
    """Record nothing."""


@dataclass(frozen=True)
class Fusion:
    """The context of fusion: everything that rules may ask for besides the group itself."""

    program: Program
    deps: Deps
    config: Config
    device: Device
    decide: Decision = ignore

    @property
    def on_gpu(self) -> bool:
        """Return whether kernels are made for a GPU."""
        return isinstance(self.device, Gpu)

    @property
    def worker(self) -> str:
        """Return the name of what runs a kernel of a single row."""
        return "program" if self.on_gpu else "thread"

    @property
    def single_row_limit(self) -> int:
        """Return the number of points that a kernel without parallel rows may not reach."""
        return self.device.row_limit if isinstance(self.device, Gpu) else self.config.parallel_threshold


@dataclass(frozen=True)
class Group:
    """The nodes of one kernel. A group of one row whose nodes are all pointwise becomes a flat kernel.

    `members`: numbers of the nodes in the program, `nodes` the nodes, `mapped` the nodes on the kernel's rows (empty
    until they are mapped). `needs`: numbers of the groups that must run earlier. `reads`, `writes`: buffers.
    `matmul`: the matrix product whose results the first node stands for (`products.epilogue`).
    `operators`: scalar operators of all nodes.
    """

    number: int
    rows: Index
    members: tuple[int, ...]
    nodes: tuple[Node, ...]
    mapped: tuple[MappedNode, ...] = ()
    extern: Extern | None = None
    needs: frozenset[int] = frozenset()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    matmul: Matmul | None = None
    operators: int = 0

    def with_node(self, k: int, node: Loop) -> Group:
        """Return the group with node number `k`, reads and writes included, and no node mapped yet."""
        return replace(
            self,
            members=(*self.members, k),
            nodes=(*self.nodes, node),
            mapped=(),
            reads=self.reads.union(reads(node)),
            writes=self.writes.union(writes(node)),
            operators=self.operators + operators(node.value),
        )

    def with_needs(self, needs: frozenset[int]) -> Group:
        """Return the group that needs `needs`, itself left out."""
        return replace(self, needs=needs - {self.number})


@functools.lru_cache(CACHED_COUNTS)
def operators(value: Value) -> int:
    """Count the scalar operators of a value."""
    return sum(v.op in OPS for v in va.walk(value))


def open_group(number: int, k: int, node: Node, device: Device) -> Group:
    """Return a new group of node number `k` alone."""
    group = Group(number, 1, (k,), (node,), reads=frozenset(reads(node)), writes=frozenset(writes(node)))
    if isinstance(node, Extern):
        return replace(group, extern=node)
    rows, mapped = _first_mapping(node, device)
    return replace(group, rows=rows, mapped=(mapped,), operators=operators(node.value))


def _first_mapping(node: Loop, device: Device) -> tuple[Index, MappedNode]:
    on_gpu = isinstance(device, Gpu)
    for natural in natural_rows(node, row_per_result=on_gpu):
        rows = 1 if natural is None else natural
        candidates = mappings(node, rows)
        if on_gpu and not isinstance(candidates, Refusal):
            # a reduction over rows only joins a kernel that another node opened
            in_row = tuple(q for q in candidates if q.kind is not Kind.CROSS_ROW)
            candidates = in_row or Refusal("no result is complete before the last row")
        if not isinstance(candidates, Refusal):
            return rows, candidates[0]
    mapped = fit(node, 1)
    assert isinstance(mapped, MappedNode), f"{node} fits no kernel"
    return 1, mapped
