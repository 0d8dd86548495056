"""Horizontal fusion: one launch for many small kernels that compute the same on different tensors.

Casts of weights and steps of optimizers are such kernels. A kernel qualifies if all of it is pointwise over one
contiguous range, the same range of every tensor that it touches; it may also read single elements. Two kernels are
alike if they differ only in their tensors and the length of the range. A kernel may wait for kernels like it until a
step needs its results; then kernels that could run by now are moved forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..debug.trace import DecisionKind
from ..ir.loops import Extern, Program, writes
from .deps import Deps
from .fusion.group import Decision
from .horizontal_parts import ANY_POINTS, MOST_POINTS, HorizontalKernel, Part, Step, horizontal_kernel, part_of
from .kernel import Kernel


@dataclass(frozen=True)
class Limits:
    """Numbers of kernels that share a launch.

    `least`: kernels that are alike before any share a launch. `parts`, `pointers`: those of one launch.
    `written_bytes`: temporaries that one launch writes, since kernels that run early or late extend lifetimes; with
    `inputs`, results in inputs and in registers count too. `points`: the range of one kernel. `lookahead`: steps that
    are searched for kernels to move forward.
    """

    least: int
    parts: int
    pointers: int
    written_bytes: int
    inputs: bool
    points: int
    lookahead: int


# the pointers of a launch must fit in 4 KB of arguments
GPU = Limits(2, parts=48, pointers=400, written_bytes=128 << 20, inputs=True, points=MOST_POINTS, lookahead=600)
# the pointers are in a table; one launch more costs a barrier of all threads, and few of them are no loss
CPU = Limits(
    4, parts=1024, pointers=1 << 14, written_bytes=16 << 20, inputs=False, points=ANY_POINTS, lookahead=1 << 14
)


def fuse_horizontally(
    p: Program, deps: Deps, kernels: Sequence[Kernel | Extern], decide: Decision, limits: Limits = GPU
) -> list[Step]:
    """Return the kernels and library calls, with kernels that are alike in one launch where their order allows it."""
    parts = [None if isinstance(k, Extern) else part_of(p, k, limits.points) for k in kernels]
    counts: dict[object, int] = {}
    for q in parts:
        if q is not None:
            counts[q.key] = counts.get(q.key, 0) + 1
    parts = [q if q is not None and counts[q.key] >= limits.least else None for q in parts]
    if all(q is None for q in parts):
        return list(kernels)
    return _Order(p, deps, list(kernels), parts, decide, limits).run()


@dataclass
class _Order:
    """Goes through the steps; kernels wait in `waiting` by key until they are full or a step must come after them."""

    p: Program
    deps: Deps
    steps: list[Kernel | Extern]
    parts: list[Part | None]
    decide: Decision
    limits: Limits
    ordered: list[Step] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    waiting: dict[object, list[int]] = field(default_factory=dict)

    def run(self) -> list[Step]:
        self.before = self._steps_before()
        self.bytes = [0 if q is None else self._bytes(q) for q in self.parts]
        for k, q in enumerate(self.parts):
            if k in self.done:
                continue
            needed = self.before[k] - self.done
            for key in [key for key, numbers in self.waiting.items() if not needed.isdisjoint(numbers)]:
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

    def _steps_before(self) -> list[set[int]]:
        """Return for each step the steps that must run earlier."""
        number = {id(n): k for k, n in enumerate(self.p.nodes)}
        members = [(number[id(s)],) if isinstance(s, Extern) else s.members for s in self.steps]
        step_of = {m: k for k, ms in enumerate(members) for m in ms}
        return [{step_of[b] for m in ms for b in self.deps.before[m]} - {k} for k, ms in enumerate(members)]

    def _full(self, numbers: list[int]) -> bool:
        q = self.parts[numbers[0]]
        assert q is not None
        many = len(numbers) >= self.limits.parts or (len(numbers) + 1) * len(q.roles) > self.limits.pointers
        return many or sum(self.bytes[n] for n in numbers) >= self.limits.written_bytes

    def _bytes(self, q: Part) -> int:
        """Return the bytes of a part's results. With `Limits.inputs` all results count, else temporaries in memory."""
        results = {b for m in q.kernel.members for b in writes(self.p.nodes[m])}
        if not self.limits.inputs:
            results = {b for b in q.kernel.stored if self.p.buffers[b].kind == "temp"}
        return q.points * sum(self.p.buffers[b].dtype.itemsize for b in results)

    def _flush(self, key: object, now: int) -> None:
        """Emit the waiting kernels of `key`, with later ones like them that could run at step `now`."""
        numbers = self.waiting.pop(key)
        for k in range(now, min(now + self.limits.lookahead, len(self.steps))):
            if self._full(numbers):
                break
            q = self.parts[k]
            if q is not None and q.key == key and k not in self.done and k not in numbers and self._ready(k):
                numbers.append(k)
        self._emit(numbers)

    def _ready(self, k: int) -> bool:
        """Return whether all steps that must come before step `k` have run."""
        return self.before[k] <= self.done

    def _emit(self, numbers: list[int]) -> None:
        self.done.update(numbers)
        if len(numbers) == 1:
            self.ordered.append(self.steps[numbers[0]])
            return
        parts = [q for k in numbers if (q := self.parts[k]) is not None]
        launch = horizontal_kernel(self.p, parts, self.limits.points)
        first = self.p.nodes[launch.parts[0].members[0]]
        reason = f"{len(numbers)} kernels that compute the same on other tensors"
        self.decide(DecisionKind.HORIZONTAL_FUSION, writes(first)[0], "fused", reason)
        self.ordered.append(launch)


def show(k: HorizontalKernel) -> str:
    """Return one line for each part."""
    lines = (f"horizontal kernel of {len(k.parts)}, part {n}: {x} points" for n, x in enumerate(k.points))
    return "\n".join(lines) + "\n"
