"""Horizontal fusion: one launch for many small kernels that compute the same on different tensors.

Casts of weights and steps of optimizers are such kernels. A kernel qualifies if all of it is pointwise over one
contiguous range, the same range of every tensor that it touches. Two kernels are alike if they differ only in their
tensors and the length of the range. A kernel may wait for kernels like it until a step needs its results; then kernels
that could run by now are moved forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..debug.trace import DecisionKind
from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.loops import Buffer, Extern, Pointwise, Program, reads, writes
from ..ir.value import Value
from .fusion.group import Decision
from .kernel import Kernel, Stage
from .loop_mapping import Kind, MappedNode

MOST_PARTS = 48  # pointers of a launch must fit in 4 KB
MOST_POINTERS = 400
MOST_BYTES = 128 << 20  # results that one launch computes: kernels that run early or late extend their lifetimes
MOST_POINTS = 1 << 24  # a larger kernel gains nothing
LOOKAHEAD = 600  # steps that are searched for kernels to move forward


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
    """A kernel that qualifies. `key` is equal for kernels that are alike; `roles` names the buffer of every role."""

    kernel: Kernel
    key: tuple[object, ...]
    nodes: tuple[Pointwise, ...]
    roles: dict[str, str]
    points: int


def fuse_horizontally(p: Program, kernels: Sequence[Kernel | Extern], decide: Decision) -> list[Step]:
    """Return the kernels and library calls, with kernels that are alike in one launch where their order allows it."""
    parts = [None if isinstance(k, Extern) else part_of(p, k) for k in kernels]
    counts: dict[object, int] = {}
    for q in parts:
        if q is not None:
            counts[q.key] = counts.get(q.key, 0) + 1
    parts = [q if q is not None and counts[q.key] > 1 else None for q in parts]
    return _Order(p, list(kernels), parts, decide).run()


# --- which kernels qualify -------------------------------------------------------------------------------------------


def part_of(p: Program, k: Kernel) -> Part | None:
    """Return the kernel as a part, or None where it does not qualify."""
    if k.rows != 1 or len(k.stages) != 1 or k.matmul is not None or any(q.kind is not Kind.POINT for q in k.nodes):
        return None
    inner = k.stages[0].inner
    n = ex.prod(ex.size_of(v) for v in inner)
    if not isinstance(n, int) or not 0 < n <= MOST_POINTS:
        return None
    position = ex.flatten([ex.size_of(v) for v in inner], [ex.ix(v) for v in inner])
    roles: dict[str, str] = {}
    point = ex.var("i0", ex.sym("n", 0, MOST_POINTS))
    nodes: list[Pointwise] = []
    for q in k.nodes:
        value = _over_range(q.value, position, ex.ix(point), roles)
        if value is None or q.index != position:
            return None
        out = roles.setdefault(q.node.out, f"b{len(roles)}")
        nodes.append(Pointwise(out, (point,), ex.ix(point), value, q.node.origins))
    buffers = [p.buffers[b] for b in roles]
    if any(b.device != buffers[0].device or b.extent != n for b in buffers):
        return None
    stored = frozenset(roles[b] for b in k.stored)
    key = tuple((x.out, x.value) for x in nodes), tuple((roles[b.name], b.dtype) for b in buffers), stored
    return Part(k, key, tuple(nodes), {role: b for b, role in roles.items()}, n)


def _over_range(value: Value, position: Index, point: Index, roles: dict[str, str]) -> Value | None:
    """Return `value` at `point` of the range with loads by role; None if it depends on anything but `position`."""
    elsewhere = False

    def on_load(x: Value) -> Value:
        nonlocal elsewhere
        name, index = x.attr
        elsewhere = elsewhere or index != position
        return va.load(roles.setdefault(name, f"b{len(roles)}"), point, x.dtype)

    rewritten = va.rewrite(value, on_load=on_load)
    return None if elsewhere or value.syms or rewritten.vars - ex.vars_of(point) else rewritten


# --- in which order they run -----------------------------------------------------------------------------------------


@dataclass
class _Order:
    """Goes through the steps; kernels wait in `waiting` by key until they are full or a step must come after them."""

    p: Program
    steps: list[Kernel | Extern]
    parts: list[Part | None]
    decide: Decision
    ordered: list[Step] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    waiting: dict[object, list[int]] = field(default_factory=dict)

    def run(self) -> list[Step]:
        self.read = [self._names(k, reads) for k in self.steps]
        self.written = [self._names(k, writes) for k in self.steps]
        self.readers, self.writers = self._positions(self.read), self._positions(self.written)
        for k, q in enumerate(self.parts):
            if k in self.done:
                continue
            blocking = [key for key, numbers in self.waiting.items() if any(self._conflict(k, n) for n in numbers)]
            for key in blocking:
                self._flush(key, k)
            if q is None:
                self._emit([k])
                continue
            self.waiting.setdefault(q.key, []).append(k)
            if self._full(self.waiting[q.key]):
                self._flush(q.key, k)
        for key in list(self.waiting):
            self._flush(key, len(self.steps))
        return self.ordered

    def _names(self, k: Kernel | Extern, of: Callable[..., Sequence[str]]) -> frozenset[str]:
        nodes = [k] if isinstance(k, Extern) else [self.p.nodes[m] for m in k.members]
        names = {b for n in nodes for b in of(n)}
        if isinstance(k, Extern):  # a result may be a view of an operand
            names.update(k.aliases)
        return frozenset(names)

    def _positions(self, names: list[frozenset[str]]) -> dict[str, list[int]]:
        positions: dict[str, list[int]] = {}
        for k, buffers in enumerate(names):
            for b in buffers:
                positions.setdefault(b, []).append(k)
        return positions

    def _conflict(self, k: int, waiting: int) -> bool:
        """Return whether step `k` must come after the waiting step."""
        after_write = self.written[waiting] & (self.read[k] | self.written[k])
        return bool(after_write or self.read[waiting] & self.written[k])

    def _full(self, numbers: list[int]) -> bool:
        q = self.parts[numbers[0]]
        assert q is not None
        many = len(numbers) >= MOST_PARTS or (len(numbers) + 1) * len(q.roles) > MOST_POINTERS
        return many or sum(self._bytes(n) for n in numbers) >= MOST_BYTES

    def _bytes(self, k: int) -> int:
        q = self.parts[k]
        assert q is not None
        return q.points * sum(self.p.buffers[b].dtype.itemsize for b in self.written[k])

    def _flush(self, key: object, now: int) -> None:
        """Emit the waiting kernels of `key`, with later ones like them that could run at step `now`."""
        numbers = self.waiting.pop(key)
        for k in range(now, min(now + LOOKAHEAD, len(self.steps))):
            q = self.parts[k]
            if self._full(numbers):
                break
            if q is not None and q.key == key and k not in self.done and k not in numbers and self._ready(k):
                numbers.append(k)
        self._emit(numbers)

    def _ready(self, k: int) -> bool:
        """Return whether all steps that must come before step `k` have run."""
        before = [m for b in self.read[k] for m in self.writers.get(b, ())]
        before += [m for b in self.written[k] for m in (*self.writers.get(b, ()), *self.readers.get(b, ()))]
        return all(m >= k or m in self.done for m in before)

    def _emit(self, numbers: list[int]) -> None:
        self.done.update(numbers)
        if len(numbers) == 1:
            self.ordered.append(self.steps[numbers[0]])
            return
        launch = horizontal_kernel(self.p, [q for k in numbers if (q := self.parts[k]) is not None])
        first = self.p.nodes[launch.parts[0].members[0]]
        reason = f"{len(numbers)} kernels that compute the same on other tensors"
        self.decide(DecisionKind.HORIZONTAL_FUSION, writes(first)[0], "fused", reason)
        self.ordered.append(launch)


def horizontal_kernel(p: Program, parts: Sequence[Part]) -> HorizontalKernel:
    """Return one launch of kernels that are alike."""
    first = parts[0]
    n = ex.sym("n", 0, MOST_POINTS)
    buffers = {}
    for role, b in first.roles.items():
        buffer = p.buffers[b]
        buffers[role] = Buffer(role, buffer.dtype, (n,), (1,), buffer.device, buffer.kind)
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


def show(k: HorizontalKernel) -> str:
    """Return one line for each part."""
    lines = (f"horizontal kernel of {len(k.parts)}, part {n}: {x} points" for n, x in enumerate(k.points))
    return "\n".join(lines) + "\n"
