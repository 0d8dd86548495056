"""Kernels that can share a launch with kernels like them: pointwise work over one contiguous range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.loops import Buffer, Extern, Pointwise, Program
from ..ir.value import Value
from .kernel import Kernel, Stage
from .loop_mapping import Kind, MappedNode

MOST_POINTS = 1 << 24  # on a GPU a larger kernel gains nothing, and the range is a 32-bit integer
ANY_POINTS = 1 << 48


@dataclass(frozen=True)
class HorizontalKernel:
    """One launch of several kernels that are alike, the `parts`.

    `body` and `kernel`: a program and its kernel for the work on `n` points, over buffers named by role. `operands`:
    for each role the buffer of every part. `points`: for every part the length of its range.
    """

    parts: tuple[Kernel, ...]
    body: Program
    kernel: Kernel
    operands: dict[str, tuple[str, ...]]
    points: tuple[int, ...]


Step = Kernel | Extern | HorizontalKernel


@dataclass(frozen=True)
class Part:
    """A kernel that qualifies. `key` is equal for kernels that are alike; `roles` names the buffer of every role.

    `single`: the roles of which every point reads the same element.
    """

    kernel: Kernel
    key: tuple[object, ...]
    nodes: tuple[Pointwise, ...]
    roles: dict[str, str]
    points: int
    single: frozenset[str]


@dataclass
class _Roles:
    """The roles of a kernel's buffers, in the order of their first use.

    `ranged`: buffers that are read or written along the range. `single`: buffers of which one element is read.
    """

    position: Index
    point: Index
    names: dict[str, str] = field(default_factory=dict)
    ranged: set[str] = field(default_factory=set)
    single: set[str] = field(default_factory=set)
    elsewhere: bool = False

    def of(self, buffer: str) -> str:
        return self.names.setdefault(buffer, f"b{len(self.names)}")

    def over_range(self, value: Value) -> Value | None:
        """Return `value` at a point of the range with loads by role; None if it depends on anything else."""
        rewritten = va.rewrite(value, on_load=self._load)
        bad = self.elsewhere or value.syms or rewritten.vars - ex.vars_of(self.point)
        return None if bad or va.may_raise(value) else rewritten

    def _load(self, x: Value) -> Value:
        name, index = x.attr
        if index == self.position:
            self.ranged.add(name)
            return va.load(self.of(name), self.point, x.dtype)
        self.elsewhere |= not isinstance(index, int)
        self.single.add(name)
        return va.load(self.of(name), index, x.dtype)


def signature(k: Kernel) -> tuple[object, ...] | None:
    """Return what kernels that are alike have in common at the least, or None for a kernel that does not qualify."""
    if k.rows != 1 or len(k.stages) != 1 or k.matmul is not None:
        return None
    nodes = k.stages[0].members
    if any(q.kind is not Kind.POINT for q in nodes):
        return None
    return tuple((q.value.op, q.value.dtype, q.value.depth, len(va.loads(q.value))) for q in nodes)


def _is_aligned(q: MappedNode, position: Index) -> bool:
    """Return whether a node reads its own position of the range, or a single element, of every buffer."""
    return all(index == position or isinstance(index, int) for _, index in va.loads(q.value))


def part_of(p: Program, k: Kernel, most_points: int = MOST_POINTS) -> Part | None:
    """Return the kernel as a part, or None where it does not qualify."""
    if signature(k) is None:
        return None
    inner = k.stages[0].inner
    n = ex.prod(ex.size_of(v) for v in inner)
    if not isinstance(n, int) or not 0 < n <= most_points:
        return None
    position = ex.flatten([ex.size_of(v) for v in inner], [ex.ix(v) for v in inner])
    point = ex.var("i0", ex.sym("n", 0, most_points))
    roles = _Roles(position, ex.ix(point))
    nodes: list[Pointwise] = []
    if not all(q.index == position and _is_aligned(q, position) for q in k.nodes):
        return None
    for q in k.nodes:
        value = roles.over_range(q.value)
        if value is None:
            return None
        roles.ranged.add(q.node.out)
        nodes.append(Pointwise(roles.of(q.node.out), (point,), ex.ix(point), value, q.node.origins))
    buffers = [p.buffers[b] for b in roles.names]
    if any(b.device != buffers[0].device for b in buffers) or roles.single & roles.ranged:
        return None
    if any(p.buffers[b].extent != n for b in roles.ranged):
        return None
    stored = frozenset(roles.names[b] for b in k.stored)
    key = tuple((x.out, x.value) for x in nodes), tuple((roles.names[b.name], b.dtype) for b in buffers), stored
    single = frozenset(roles.names[b] for b in roles.single)
    return Part(k, key, tuple(nodes), {role: b for b, role in roles.names.items()}, n, single)


def horizontal_kernel(p: Program, parts: Sequence[Part], most_points: int = MOST_POINTS) -> HorizontalKernel:
    """Return one launch of kernels that are alike."""
    first = parts[0]
    n = ex.sym("n", 0, most_points)
    buffers = {}
    for role, b in first.roles.items():
        buffer = p.buffers[b]
        sizes, strides = (buffer.sizes, buffer.strides) if role in first.single else ((n,), (1,))
        buffers[role] = Buffer(role, buffer.dtype, sizes, strides, buffer.device, buffer.kind)
    row = ex.var("o", 1)
    mapped = tuple(MappedNode(x, Kind.POINT, row, x.dims, frozenset(), x.index, x.value) for x in first.nodes)
    kernel = Kernel(
        rows=1,
        flat=True,
        stages=(Stage(mapped[0].inner, mapped),),
        storage={role: first.kernel.storage[b] for role, b in first.roles.items() if b in first.kernel.storage},
        stored=frozenset(role for role, b in first.roles.items() if b in first.kernel.stored),
        scratch={},
        work=0,
        members=tuple(range(len(first.nodes))),
        origins=tuple(o for q in parts for o in q.kernel.origins),
    )
    body = Program(buffers, (), first.nodes, ())
    operands = {role: tuple(q.roles[role] for q in parts) for role in first.roles}
    return HorizontalKernel(tuple(q.kernel for q in parts), body, kernel, operands, tuple(q.points for q in parts))
