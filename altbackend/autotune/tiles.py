"""Tuning of blocks and warps of a kernel: the heuristics' choice, or a variant that was measured to be faster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import field
from math import prod

import torch

from altbackend.lazy_dataclass import dataclass

from ..codegen.host import cuda_program
from ..codegen.triton import print_triton
from ..codegen.triton.print_triton import Emitted, TritonKernel
from ..config.options import Config
from ..debug.trace import DecisionKind
from ..errors import AltError
from ..ir.loops import Program
from ..runtime.cuda import Cubin
from ..schedule.device import ScheduleContext
from ..schedule.fusion.group import Decision
from ..schedule.tiling.gpu import blocks
from ..schedule.tiling.gpu.blocks import Blocks
from ..schedule.tiling.gpu.tiled import tile_kernel
from . import tuner
from .measure import MeasurerDied
from .measured_times import Times
from .tuner import Tuner

GAIN = 0.97  # of the time of the heuristics' choice; a smaller gain is within the noise of two measurements
RULES = "rules"
SMALL = 1 << 18  # elements of all buffers together; below, the launch dominates the time of any variant


@dataclass(frozen=True)
class Search:
    """A kernel and its variants. Of equal kernels, only the first one holds what measuring needs.

    `key` is common to equal kernels. `question`: all that the times depend on. `variants`: printed kernels, the
    heuristics' choice included. `jobs`: the machine code of every launch of every variant.
    """

    default: Emitted
    key: str = ""
    blocks: dict[str, Blocks] = field(default_factory=dict)
    question: str = ""
    variants: dict[str, Emitted] = field(default_factory=dict)
    jobs: dict[str, list[Future[Cubin]]] = field(default_factory=dict)


@dataclass(frozen=True)
class TileTuner(Tuner):
    """Chooses the blocks of kernels. `times_of`: times by the key of a kernel."""

    times_of: dict[str, Times] = field(default_factory=dict)

    def tuned(self, p: Program, kernels: Sequence[Emitted], decision: Decision) -> list[Emitted]:
        """Return the fastest variant of every kernel. All of them compile while the first ones are measured."""
        searches = [self.search(p, e) for e in kernels]
        return [self._best(p, s, decision) for s in searches]

    def search(self, p: Program, e: Emitted) -> Search:
        """Print the variants, and start compiling those without stored times."""
        tiled, printed, buffers = e
        if printed.symbols or _elements(p, buffers) < SMALL:
            return Search(e)
        sizes = [str(p.buffers[b].extent) for b in buffers]
        key = "\n".join([self.machine, " ".join(sizes), _text(printed)])
        choices = blocks.variants(tiled.blocks)
        named = {f"{b.warps} warps, {b.xblock} x {b.programs}": b for b in choices}
        if key in self.times_of:
            return Search(e, key, named)
        variants = {RULES: e} | dict(self._variants(p, e, named))
        question = "\n".join([key, *variants, _digest(variants)])
        self.times_of[key] = self.store.read(question) or {}
        jobs = {} if self.times_of[key] else {label: self._jobs(p, v) for label, v in variants.items()}
        return Search(e, key, named, question, variants, jobs)

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

    def _best(self, p: Program, s: Search, decision: Decision) -> Emitted:
        if s.jobs:
            self.times_of[s.key] = self._measured(p, s)
        comparison = tuner.compare(self.times_of.get(s.key, {}), s.blocks, RULES, GAIN, "as the rules choose")
        if comparison is None:
            return s.default
        subject = ", ".join(s.default[2])
        if not comparison.is_faster:
            reason = f"not faster: {comparison.text} with {comparison.best}"
            decision(DecisionKind.TILES, subject, "as the rules choose", reason)
            return s.default
        decision(DecisionKind.TILES, subject, comparison.best, comparison.text)
        tiled = tile_kernel(p, s.default[0].kernel, self.context, s.blocks[comparison.best])
        return (tiled, *print_triton.emit(p, tiled))

    def _measured(self, p: Program, s: Search) -> Times:
        try:
            return self.times(
                s.question, lambda: {label: self._run(p, e, s.jobs[label]) for label, e in s.variants.items()}
            )
        except MeasurerDied as cause:
            tuner.warn_once(str(cause))
            return {}

    def _run(self, p: Program, e: Emitted, jobs: list[Future[Cubin]]) -> tuner.Candidate:
        own, launches = _launches(p, e)
        return own, [(x.kernel, x.buffers, job) for x, job in zip(launches, jobs, strict=True)]


def _launches(p: Program, e: Emitted) -> tuple[Program, list[cuda_program.CudaLaunch]]:
    tiled, printed, buffers = e
    return cuda_program.launches(p, printed, buffers, tiled.kernel.origins, 0)


def _elements(p: Program, buffers: Sequence[str]) -> int:
    extents = [p.buffers[b].extent for b in buffers]
    return sum(n for n in extents if isinstance(n, int))


def _digest(variants: dict[str, Emitted]) -> str:
    return hashlib.sha256("\n".join(_text(printed) for _, printed, _ in variants.values()).encode()).hexdigest()


def _text(k: TritonKernel) -> str:
    """Return text that distinguishes variants; it also determines the kernels that finish a variant's work."""
    grid = prod(n for n in k.grid if isinstance(n, int))
    return f"{k.source}{k.constexprs}{grid} {k.num_warps} {k.num_stages}"


def tile_tuner(cfg: Config, context: ScheduleContext, device: torch.device) -> TileTuner | None:
    """Return the tuner of the kernels of a graph; None unless max_autotune is set."""
    if not cfg.max_autotune or cfg.deterministic:
        return None
    return TileTuner(*tuner.means_of(cfg, context, device))
