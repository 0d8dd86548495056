"""Horizontal fusion: one launch for many small kernels that compute the same on different tensors.

Casts of weights and steps of optimizers are such kernels. A kernel qualifies if all of it is pointwise over one
contiguous range, the same range of every tensor that it touches; it may also read single elements. Two kernels are
alike if they differ only in their tensors and the length of the range. A kernel may wait for kernels like it until a
step needs its results; then kernels that could run by now are moved forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from heapq import heappop, heappush

from altbackend.lazy_dataclass import dataclass

from ..debug.trace import DecisionKind
from ..ir.loops import Extern, Program, writes
from .deps import Deps
from .fusion.group import Decision
from .horizontal_parts import (
    ANY_POINTS,
    MOST_POINTS,
    HorizontalKernel,
    Part,
    Step,
    horizontal_kernel,
    part_of,
    signature,
)
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
    signatures = [None if isinstance(k, Extern) else signature(k) for k in kernels]
    counts = Counter(x for x in signatures if x is not None)
    parts = [
        None if isinstance(k, Extern) or x is None or counts[x] < limits.least else part_of(p, k, limits.points)
        for k, x in zip(kernels, signatures, strict=True)
    ]
    keys = Counter(q.key for q in parts if q is not None)
    parts = [q if q is not None and keys[q.key] >= limits.least else None for q in parts]
    if all(q is None for q in parts):
        return list(kernels)
    return _Order(p, deps, list(kernels), parts, decide, limits).run()


@dataclass
class _Waiting:
    """Steps of kernels that are alike, and the bytes that they write."""

    numbers: list[int] = field(default_factory=list)
    written: int = 0

    def add(self, number: int, written: int) -> None:
        self.numbers.append(number)
        self.written += written


@dataclass
class _Order:
    """Goes through the steps; kernels wait in `waiting` by key until they are full or a step must come after them.

    `ready`: by key, a heap of the kernels whose predecessors have all run. They may have run too.
    """

    p: Program
    deps: Deps
    steps: list[Kernel | Extern]
    parts: list[Part | None]
    decide: Decision
    limits: Limits
    ordered: list[Step] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    waiting: dict[object, _Waiting] = field(default_factory=dict)
    ready: dict[object, list[int]] = field(default_factory=dict)

    def run(self) -> list[Step]:
        self.before = self._steps_before()
        self.after: list[list[int]] = [[] for _ in self.steps]
        self.missing = [len(b) for b in self.before]
        for k, numbers in enumerate(self.before):
            for n in numbers:
                self.after[n].append(k)
            if not numbers:
                self._note_ready(k)
        self.bytes = [0 if q is None else self._bytes(q) for q in self.parts]
        for k, q in enumerate(self.parts):
            if k in self.done:
                continue
            needed: set[object] = {
                part.key for n in self.before[k] if n not in self.done and (part := self.parts[n]) is not None
            }
            for key in [key for key in self.waiting if key in needed] if needed else ():
                self._flush(key, k)
            if q is None:
                self._emit([k])
                continue
            waiting = self.waiting.setdefault(q.key, _Waiting())
            waiting.add(k, self.bytes[k])
            if self._full(waiting):
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

    def _note_ready(self, k: int) -> None:
        q = self.parts[k]
        if q is not None:
            heappush(self.ready.setdefault(q.key, []), k)

    def _full(self, w: _Waiting) -> bool:
        q = self.parts[w.numbers[0]]
        assert q is not None
        many = len(w.numbers) >= self.limits.parts or (len(w.numbers) + 1) * len(q.roles) > self.limits.pointers
        return many or w.written >= self.limits.written_bytes

    def _bytes(self, q: Part) -> int:
        """Return the bytes of a part's results. With `Limits.inputs` all results count, else temporaries in memory."""
        results = {b for m in q.kernel.members for b in writes(self.p.nodes[m])}
        if not self.limits.inputs:
            results = {b for b in q.kernel.stored if self.p.buffers[b].kind == "temp"}
        return q.points * sum(self.p.buffers[b].dtype.itemsize for b in results)

    def _flush(self, key: object, now: int) -> None:
        """Emit the waiting kernels of `key`, with later ones like them that could run at step `now`."""
        waiting = self.waiting.pop(key)
        own, ready = set(waiting.numbers), self.ready[key]
        while ready and ready[0] < now + self.limits.lookahead and not self._full(waiting):
            k = heappop(ready)
            if k not in self.done and k not in own:
                waiting.add(k, self.bytes[k])
        self._emit(waiting.numbers)

    def _emit(self, numbers: list[int]) -> None:
        self.done.update(numbers)
        for k in (after for n in numbers for after in self.after[n]):
            self.missing[k] -= 1
            if not self.missing[k]:
                self._note_ready(k)
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
