"""Blocks and warps of a kernel: those that the rules choose, or a variant that measuring shows to be faster."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod

import torch

from ..codegen.host import cuda_program
from ..codegen.triton import print_triton
from ..codegen.triton.print_triton import Emitted, TritonKernel
from ..config.options import Config
from ..errors import AltError
from ..ir.loops import Program
from ..runtime.cuda import Cubin
from ..schedule.device import ScheduleContext
from ..schedule.fusion.group import Decision
from ..schedule.tiling.gpu import blocks
from ..schedule.tiling.gpu.blocks import Blocks
from ..schedule.tiling.gpu.tiled import tile_kernel
from . import measure, products, trial
from .measure import MeasurerDied, TrialFailed
from .measured_times import MeasuredTimes, Times

GAIN = 0.97  # of the time of the rules' choice: less is within what two measurements differ by
RULES = "rules"
SMALL = 1 << 18  # elements of all buffers together: below, a launch takes what any kernel takes
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A kernel and the blocks it may have; the first of equal kernels comes with what measures them.

    `key`: what equal kernels share. `question`: all that the times depend on. `variants`: emitted, the rules' among
    them. `jobs`: the machine code of every launch of every variant.
    """

    chosen: Emitted
    key: str = ""
    blocks: dict[str, Blocks] = field(default_factory=dict)
    question: str = ""
    variants: dict[str, Emitted] = field(default_factory=dict)
    jobs: dict[str, list[Future[Cubin]]] = field(default_factory=dict)


@dataclass(frozen=True)
class TileTuner:
    """`measured`: microseconds of a trial, or TrialFailed or MeasurerDied. `machine`: what times depend on besides the
    code. `known`: times by the key of a kernel."""

    context: ScheduleContext
    machine: str
    compiled: Callable[[TritonKernel], Future[Cubin]]
    measured: Callable[[trial.Trial], float]
    store: MeasuredTimes
    known: dict[str, Times] = field(default_factory=dict)

    def tuned(self, p: Program, kernels: Sequence[Emitted], decision: Decision) -> list[Emitted]:
        """The fastest variant of every kernel; all of them compile while the first are measured."""
        asked = [self.ask(p, e) for e in kernels]
        return [self._best(p, a, decision) for a in asked]

    def ask(self, p: Program, e: Emitted) -> Asked:
        """Emit the variants and start compiling those that nobody has measured yet."""
        tiled, made, buffers = e
        if made.symbols or _elements(p, buffers) < SMALL:
            return Asked(e)
        sizes = [str(p.buffers[b].extent) for b in buffers]
        key = "\n".join([self.machine, " ".join(sizes), _text(made)])
        found = blocks.variants(tiled.blocks)
        named = {f"{b.warps} warps, {b.xblock} x {b.programs}": b for b in found}
        if key in self.known:
            return Asked(e, key, named)
        variants = {RULES: e} | dict(self._variants(p, e, named))
        question = "\n".join([key, *variants, _digest(variants)])
        self.known[key] = self.store.read(question) or {}
        jobs = {} if self.known[key] else {label: self._jobs(p, v) for label, v in variants.items()}
        return Asked(e, key, named, question, variants, jobs)

    def _variants(self, p: Program, e: Emitted, named: dict[str, Blocks]) -> Iterator[tuple[str, Emitted]]:
        seen = {_text(e[1])}
        for label, b in named.items():
            try:
                tiled = tile_kernel(p, e[0].kernel, self.context, b)
                other, buffers = print_triton.emit(p, tiled)
            except AltError:
                continue
            if _text(other) not in seen:
                seen.add(_text(other))
                yield label, (tiled, other, buffers)

    def _jobs(self, p: Program, e: Emitted) -> list[Future[Cubin]]:
        return [self.compiled(launch.kernel) for launch in _launches(p, e)[1]]

    def _best(self, p: Program, a: Asked, decision: Decision) -> Emitted:
        if a.jobs:
            self.known[a.key] = self._times(p, a)
        times = self.known.get(a.key, {})
        known = [label for label in a.blocks if label in times]
        if RULES not in times or not known:
            return a.chosen
        best, rules = min(known, key=times.__getitem__), times[RULES]
        text = f"{times[best]:.1f} us measured, {rules:.1f} us as the rules choose"
        if times[best] >= GAIN * rules:
            decision("tiles", ", ".join(a.chosen[2]), "as the rules choose", f"not faster: {text} with {best}")
            return a.chosen
        decision("tiles", ", ".join(a.chosen[2]), best, text)
        tiled = tile_kernel(p, a.chosen[0].kernel, self.context, a.blocks[best])
        return (tiled, *print_triton.emit(p, tiled))

    def _times(self, p: Program, a: Asked) -> Times:
        """Microseconds by variant; what does not compile or run is left out."""
        with self.store.lock(a.question):
            if (times := self.store.read(a.question)) is not None:
                return times
            try:
                found = {label: self._time(p, e, a.jobs[label]) for label, e in a.variants.items()}
            except MeasurerDied as cause:
                products.say_once(str(cause))
                return {}
            times = {label: us for label, us in found.items() if us is not None}
            self.store.write(a.question, times)
            return times

    def _time(self, p: Program, e: Emitted, jobs: list[Future[Cubin]]) -> float | None:
        own, launches = _launches(p, e)
        try:
            steps = [(x.kernel, x.buffers, job.result()) for x, job in zip(launches, jobs, strict=True)]
            return self.measured(trial.of(own, steps))
        except (TrialFailed, AltError) as cause:
            logger.debug("a variant is left out: %s", cause)
            return None


def _launches(p: Program, e: Emitted) -> tuple[Program, list[cuda_program.CudaLaunch]]:
    tiled, made, buffers = e
    return cuda_program.launches(p, made, buffers, tiled.kernel.origins, 0)


def _elements(p: Program, buffers: Sequence[str]) -> int:
    extents = [p.buffers[b].extent for b in buffers]
    return sum(n for n in extents if isinstance(n, int))


def _digest(variants: dict[str, Emitted]) -> str:
    return hashlib.sha256("\n".join(_text(made) for _, made, _ in variants.values()).encode()).hexdigest()


def _text(k: TritonKernel) -> str:
    """What tells variants apart; kernels that follow are decided by it."""
    grid = prod(n for n in k.grid if isinstance(n, int))
    return f"{k.source}{k.constexprs}{grid} {k.num_warps} {k.num_stages}"


def tuner(cfg: Config, context: ScheduleContext, device: torch.device) -> TileTuner | None:
    """Who measures the kernels of a graph, if anybody: only max_autotune does."""
    if not cfg.max_autotune or cfg.deterministic:
        return None
    machine, compiled, store = products.means(cfg, device)
    return TileTuner(context, machine, compiled, measure.on_device(device.index or 0), store)
