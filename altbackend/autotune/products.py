"""Library call and separate kernel, or one kernel and of which tiles: chosen by measuring all of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from .. import __version__
from ..codegen.triton import print_triton
from ..codegen.triton.print_triton import TritonKernel
from ..compat import torch_api
from ..compile_pool import cuda as compile_cuda
from ..config.options import Config
from ..disk_cache.storage import open_store
from ..errors import AltError
from ..ir.loops import Program
from ..runtime.cuda import Cubin
from ..schedule import kernel
from ..schedule.deps import Deps
from ..schedule.device import Gpu, ScheduleContext
from ..schedule.fusion.group import Group
from ..schedule.loop_mapping import Refusal
from ..schedule.products import cost
from ..schedule.products.epilogue import Candidate, Choose
from ..schedule.products.matmul import Tiles, fits
from ..schedule.tiling.gpu.tiled import tile_kernel
from . import measure, trial
from .measure import MeasurerDied, TrialFailed
from .measured_times import MeasuredTimes, Times

GAIN = 0.98  # of the time apart: less is within what two measurements differ by
LIBRARY = "library"
logger = logging.getLogger(__name__)

Emitted = tuple[TritonKernel, tuple[str, ...]]
Compile = Callable[[TritonKernel], "Future[Cubin]"]


@dataclass(frozen=True)
class Tuner:
    """`measured`: microseconds of a trial, or TrialFailed or MeasurerDied. `default`: who chooses where nothing can be
    measured; None keeps the library call. `machine`: what times depend on besides the code."""

    context: ScheduleContext
    machine: str
    compiled: Compile
    measured: Callable[[trial.Trial], float]
    store: MeasuredTimes
    default: Choose | None = None

    @property
    def gpu(self) -> Gpu:
        """Return the GPU on which candidates are measured."""
        assert isinstance(self.context.device, Gpu)
        return self.context.device

    def choose(self, p: Program, deps: Deps, c: Candidate) -> tuple[Tiles, str] | Refusal:
        """Tiles of the fastest candidate, or that the library call with a separate kernel is as fast."""
        if c.matmul.vectors:
            return Refusal(c.matmul.vectors)
        emitted = self.candidates(p, deps, c)
        if isinstance(emitted, Refusal):
            return self._default(p, deps, c, emitted.reason)
        question = self._question(c, emitted)
        times = self.store.read(question)
        if times is None:
            with self.store.lock(question):
                times = self.store.read(question)
                try:
                    times = times or self.times(p, c, emitted)
                except MeasurerDied as cause:
                    say_once(str(cause))
                    return self._default(p, deps, c, str(cause))
                self.store.write(question, times)
        return self._best(p, deps, c, times)

    def candidates(
        self, p: Program, deps: Deps, c: Candidate, search: Sequence[Tiles] = cost.SEARCH
    ) -> dict[str, Emitted] | Refusal:
        """By name, the separate kernel and those of the tiles of `search`; what has no Triton form is left out."""
        separate = self._emit(p, deps, c.reader)
        if isinstance(separate, Refusal):
            return separate
        out = {LIBRARY: separate}
        fitting = [t for t in search if fits(p, deps.writers, c.matmul, t, self.gpu.shared_memory)]
        out |= {str(t): k for t in fitting if not isinstance(k := self._emit(p, deps, c.with_tiles(t)), Refusal)}
        return out if len(out) > 1 else Refusal("no tiles fit")

    def _emit(self, p: Program, deps: Deps, g: Group) -> Emitted | Refusal:
        try:
            tiled = tile_kernel(p, kernel.build(p, deps, g, self.context.device), self.context)
            made = print_triton.emit(p, tiled)
        except AltError as cause:
            return Refusal(str(cause))
        why = trial.refusal(made[0])
        return made if why is None else Refusal(why)

    def _question(self, c: Candidate, emitted: dict[str, Emitted]) -> str:
        """Everything that the times depend on: kernels name no buffers, and hold sizes, layouts and the epilogue.

        The separate kernel and the first of the others are there to read, all of them by their hash.
        """
        m, sources = c.matmul, [k.source for k, _ in emitted.values()]
        digest = hashlib.sha256("\n".join(sources).encode()).hexdigest()
        assert c.library.extern is not None
        call = (c.library.extern.target, m.batch, m.rows, m.columns, m.depth, m.dtype)
        return "\n".join([self.machine, *map(str, call), ", ".join(emitted), digest, *sources[:2]])

    def times(self, p: Program, c: Candidate, emitted: dict[str, Emitted]) -> Times:
        """Microseconds by name; what does not compile or run is left out. Raises MeasurerDied."""
        jobs = {label: self.compiled(e[0]) for label, e in emitted.items()}
        found = {label: self._time(p, c, label, *emitted[label], job) for label, job in jobs.items()}
        return {label: t for label, t in found.items() if t is not None}

    def _time(
        self, p: Program, c: Candidate, label: str, k: TritonKernel, buffers: tuple[str, ...], job: Future[Cubin]
    ) -> float | None:
        try:
            launch = (k, buffers, job.result())
            call = c.library.extern
            return self.measured(trial.of(p, [call, launch] if label == LIBRARY and call is not None else [launch]))
        except (TrialFailed, AltError) as cause:
            logger.debug("candidate %s is left out: %s", label, cause)
            return None

    def _best(self, p: Program, deps: Deps, c: Candidate, times: Times) -> tuple[Tiles, str] | Refusal:
        apart = times.get(LIBRARY)
        known = [t for t in cost.SEARCH if str(t) in times]
        if apart is None or not known:
            return self._default(p, deps, c, "no candidate could be measured")
        best = min(known, key=lambda t: times[str(t)])
        text = f"{times[str(best)]:.1f} us measured, {apart:.1f} us apart"
        return (best, text) if times[str(best)] < GAIN * apart else Refusal(f"not faster: {text} with {best}")

    def _default(self, p: Program, deps: Deps, c: Candidate, why: str) -> tuple[Tiles, str] | Refusal:
        return Refusal(f"not measured: {why}") if self.default is None else self.default(p, deps, c)


_said: set[str] = set()


def say_once(text: str) -> None:
    """A warning, the first time."""
    if not _said:
        logger.warning("max_autotune chooses without measuring: %s", text)
    _said.add(text)


def chooser(cfg: Config, context: ScheduleContext, p: Program) -> Choose | None:
    """Who chooses for the products of a graph on a GPU, if anybody: by measuring with max_autotune, else the model."""
    if cfg.matmul_templates == "off":
        return None
    device = next(b.device for b in p.buffers.values() if b.device.type == "cuda")
    if cfg.max_autotune and not cfg.deterministic:
        return tuner(cfg, context, device).choose
    return _by_model(cfg, context)


def _by_model(cfg: Config, context: ScheduleContext) -> Choose | None:
    assert isinstance(context.device, Gpu)
    return cost.chooser(cfg, context.device)


def tuner(cfg: Config, context: ScheduleContext, device: torch.device) -> Tuner:
    """A tuner of the GPU `device`."""
    machine, compiled, store = means(cfg, device)
    measured = measure.on_device(device.index or 0)
    return Tuner(context, machine, compiled, measured, store, _by_model(cfg, context))


def means(cfg: Config, device: torch.device) -> tuple[str, Compile, MeasuredTimes]:
    """What times on the GPU `device` depend on besides the code, who compiles candidates, and where times are kept."""
    capability = torch_api.cuda_capability(device)

    def compiled(k: TritonKernel) -> Future[Cubin]:
        return compile_cuda.submit(compile_cuda.job_of(k, range(len(k.params)), capability), cfg)

    versions = (torch_api.cuda_name(device), torch.__version__, compile_cuda.triton_version(), __version__)
    kept = open_store(cfg)
    store = MeasuredTimes(kept.folder / "autotune", beneath=tuple(folder / "autotune" for folder in kept.beneath))
    return " ".join(versions), compiled, store
