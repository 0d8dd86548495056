"""Many small kernels that do the same to different tensors, as one launch: casts of weights, steps of an optimizer.

A kernel qualifies if all of it is pointwise over one contiguous range, the same range of every tensor that it touches.
Two are alike if they differ in nothing but their tensors and the length of the range. A kernel may wait for others like
it until something needs its results; then others that could run by now are taken forward.
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
from .kernel import Kernel, Stage
from .loop_mapping import MappedNode

MOST_PARTS = 48  # pointers of a launch must fit in 4 KB
MOST_POINTERS = 400
MOST_BYTES = 128 << 20  # results that a bundle makes at a time: what is made early or late takes memory
MOST_POINTS = 1 << 24  # a larger kernel gains nothing
AHEAD = 600  # steps that are searched for more

Decision = Callable[[DecisionKind, str, str, str], None]


@dataclass(frozen=True)
class Bundle:
    """`body`: a program and kernel of the work on `n` points, over buffers named by role.

    `operands`: role -> per part the buffer. `points`: per part the length of its range.
    """

    parts: tuple[Kernel, ...]
    body: Program
    kernel: Kernel
    operands: dict[str, tuple[str, ...]]
    points: tuple[int, ...]


Step = Kernel | Extern | Bundle


@dataclass(frozen=True)
class Part:
    """A kernel that qualifies. `key`: equal for kernels that are alike; `roles`: role -> buffer."""

    kernel: Kernel
    key: tuple[object, ...]
    nodes: tuple[Pointwise, ...]
    roles: dict[str, str]
    points: int


def bundled(p: Program, kernels: Sequence[Kernel | Extern], decision: Decision) -> list[Step]:
    """The kernels and library calls, alike kernels together where their order allows it."""
    parts = [None if isinstance(k, Extern) else part_of(p, k) for k in kernels]
    counts: dict[object, int] = {}
    for q in parts:
        if q is not None:
            counts[q.key] = counts.get(q.key, 0) + 1
    parts = [q if q is not None and counts[q.key] > 1 else None for q in parts]
    return _Order(p, list(kernels), parts, decision).run()


# --- which kernels -----------------------------------------------------------------------------------------------


def part_of(p: Program, k: Kernel) -> Part | None:
    """The kernel as a part, or None where it does not qualify."""
    if k.rows != 1 or len(k.stages) != 1 or k.matmul is not None or any(q.kind != "point" for q in k.stages[0].members):
        return None
    members, inner = k.stages[0].members, k.stages[0].inner
    n = ex.prod(ex.size_of(v) for v in inner)
    if not isinstance(n, int) or not 0 < n <= MOST_POINTS:
        return None
    flat = ex.flatten([ex.size_of(v) for v in inner], [ex.ix(v) for v in inner])
    roles: dict[str, str] = {}
    point = ex.var("i0", ex.sym("n", 0, MOST_POINTS))
    nodes: list[Pointwise] = []
    for q in members:
        value = _over_range(q.value, flat, ex.ix(point), roles)
        if value is None or q.index != flat:
            return None
        out = roles.setdefault(q.node.out, f"b{len(roles)}")
        nodes.append(Pointwise(out, (point,), ex.ix(point), value, q.node.origins))
    held = [p.buffers[b] for b in roles]
    if any(b.device != held[0].device or b.extent != n for b in held):
        return None
    key = tuple((x.out, x.value) for x in nodes), tuple((roles[b.name], b.dtype) for b in held), _stored(k, roles)
    return Part(k, key, tuple(nodes), {role: b for b, role in roles.items()}, n)


def _stored(k: Kernel, roles: dict[str, str]) -> frozenset[str]:
    return frozenset(roles[b] for b in k.stored)


def _over_range(value: Value, flat: Index, at: Index, roles: dict[str, str]) -> Value | None:
    """`value` at point `at` of the range, its loads by role; None if it reads or depends on anything else."""
    elsewhere = False

    def on_load(x: Value) -> Value:
        nonlocal elsewhere
        name, index = x.attr
        elsewhere = elsewhere or index != flat
        return va.load(roles.setdefault(name, f"b{len(roles)}"), at, x.dtype)

    out = va.rewrite(value, on_load=on_load)
    return None if elsewhere or value.syms or out.vars - ex.vars_of(at) else out


# --- in which order ----------------------------------------------------------------------------------------------


@dataclass
class _Order:
    p: Program
    steps: list[Kernel | Extern]
    parts: list[Part | None]
    decision: Decision
    out: list[Step] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    waiting: dict[object, list[int]] = field(default_factory=dict)

    def run(self) -> list[Step]:
        self.read = [self._names(k, reads) for k in self.steps]
        self.written = [self._names(k, writes) for k in self.steps]
        self.readers, self.writers = self._positions(self.read), self._positions(self.written)
        for k, q in enumerate(self.parts):
            if k in self.done:
                continue
            for key in [key for key, held in self.waiting.items() if any(self._meet(k, h) for h in held)]:
                self._flush(key, k)
            if q is None:
                self._emit([k])
                continue
            self.waiting.setdefault(q.key, []).append(k)
            if self._full(self.waiting[q.key]):
                self._flush(q.key, k)
        for key in list(self.waiting):
            self._flush(key, len(self.steps))
        return self.out

    def _names(self, k: Kernel | Extern, of: Callable[..., Sequence[str]]) -> frozenset[str]:
        nodes = [k] if isinstance(k, Extern) else [self.p.nodes[m] for m in k.members]
        found = {b for n in nodes for b in of(n)}
        if isinstance(k, Extern):  # a result may be a view of what it was made from
            found.update(k.aliases)
        return frozenset(found)

    def _positions(self, names: list[frozenset[str]]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for k, bs in enumerate(names):
            for b in bs:
                out.setdefault(b, []).append(k)
        return out

    def _meet(self, k: int, held: int) -> bool:
        """Whether step `k` must come after the waiting step `held`."""
        return bool(self.written[held] & (self.read[k] | self.written[k]) or self.read[held] & self.written[k])

    def _full(self, held: list[int]) -> bool:
        q = self.parts[held[0]]
        assert q is not None
        many = len(held) >= MOST_PARTS or (len(held) + 1) * len(q.roles) > MOST_POINTERS
        return many or sum(self._bytes(h) for h in held) >= MOST_BYTES

    def _bytes(self, k: int) -> int:
        q = self.parts[k]
        assert q is not None
        return q.points * sum(self.p.buffers[b].dtype.itemsize for b in self.written[k])

    def _flush(self, key: object, now: int) -> None:
        held = self.waiting.pop(key)
        for k in range(now, min(now + AHEAD, len(self.steps))):
            q = self.parts[k]
            if self._full(held):
                break
            if q is not None and q.key == key and k not in self.done and k not in held and self._ready(k):
                held.append(k)
        self._emit(held)

    def _ready(self, k: int) -> bool:
        """Whether nothing that is still to run must come before step `k`."""
        before = [m for b in self.read[k] for m in self.writers.get(b, ())]
        before += [m for b in self.written[k] for m in (*self.writers.get(b, ()), *self.readers.get(b, ()))]
        return all(m >= k or m in self.done for m in before)

    def _emit(self, ks: list[int]) -> None:
        self.done.update(ks)
        if len(ks) == 1:
            self.out.append(self.steps[ks[0]])
            return
        made = bundle(self.p, [q for k in ks if (q := self.parts[k]) is not None])
        first = self.p.nodes[made.parts[0].members[0]]
        self.decision(
            DecisionKind.HORIZONTAL_FUSION,
            writes(first)[0],
            "bundled",
            f"{len(ks)} kernels that do the same to other tensors",
        )
        self.out.append(made)


def bundle(p: Program, parts: Sequence[Part]) -> Bundle:
    """One launch of kernels that are alike."""
    first = parts[0]
    n = ex.sym("n", 0, MOST_POINTS)
    buffers = {}
    for role, b in first.roles.items():
        held = p.buffers[b]
        buffers[role] = Buffer(role, held.dtype, (n,), (1,), held.device, held.kind)
    stored = frozenset(role for role, b in first.roles.items() if b in first.kernel.stored)
    row = ex.var("o", 1)
    mapped = tuple(MappedNode(x, "point", row, x.dims, frozenset(), x.index, x.value) for x in first.nodes)
    kernel = Kernel(
        rows=1,
        flat=True,
        stages=(Stage(mapped[0].inner, mapped),),
        storage={role: first.kernel.storage[b] for role, b in first.roles.items() if b in first.kernel.storage},
        stored=stored,
        scratch={},
        work=0,
        members=tuple(range(len(first.nodes))),
        origins=tuple(o for q in parts for o in q.kernel.origins),
    )
    body = Program(buffers, (), first.nodes, ())
    operands = {role: tuple(q.roles[role] for q in parts) for role in first.roles}
    return Bundle(tuple(q.kernel for q in parts), body, kernel, operands, tuple(q.points for q in parts))


def show(b: Bundle) -> str:
    """One line a part."""
    return "\n".join(f"bundle of {len(b.parts)}, part {n}: {x} points" for n, x in enumerate(b.points)) + "\n"
