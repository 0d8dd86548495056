"""Tuning of matrix products: a library call with a separate kernel, or one fused kernel with some tile sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ..codegen.triton import print_triton
from ..codegen.triton.print_triton import TritonKernel
from ..config.options import Config
from ..errors import AltError
from ..ir.loops import Program
from ..schedule import kernel
from ..schedule.deps import Deps
from ..schedule.device import Gpu, ScheduleContext
from ..schedule.fusion.group import Group
from ..schedule.loop_mapping import Refusal
from ..schedule.products import cost
from ..schedule.products.epilogue import Candidate, Choose
from ..schedule.products.matmul import Tiles, fits
from ..schedule.tiling.gpu.tiled import tile_kernel
from . import trial, tuner
from .measure import MeasurerDied
from .measured_times import Times
from .tuner import Step, Tuner

GAIN = 0.98  # of the separate kernels' time; a smaller gain is within the noise of two measurements
LIBRARY = "library"

Emitted = tuple[TritonKernel, tuple[str, ...]]


@dataclass(frozen=True)
class ProductTuner(Tuner):
    """Chooses between the library and fused kernels.

    `default` chooses where nothing can be measured; without it, the library call stays.
    """

    default: Choose | None = None

    @property
    def gpu(self) -> Gpu:
        """Return the GPU on which candidates are measured."""
        assert isinstance(self.context.device, Gpu)
        return self.context.device

    def choose(self, p: Program, deps: Deps, c: Candidate) -> tuple[Tiles, str] | Refusal:
        """Return the tile sizes of the fastest fused kernel, or a refusal if the library call is as fast."""
        if c.matmul.vectors:
            return Refusal(c.matmul.vectors)
        emitted = self.candidates(p, deps, c)
        if isinstance(emitted, Refusal):
            return self._default(p, deps, c, emitted.reason)
        question = self._question(c, emitted)
        times = self.store.read(question)
        try:
            if times is None:
                times = self.times(question, lambda: self.runs(p, c, emitted))
        except MeasurerDied as cause:
            tuner.warn_once(str(cause))
            return self._default(p, deps, c, str(cause))
        return self._best(p, deps, c, times)

    def candidates(
        self, p: Program, deps: Deps, c: Candidate, search: Sequence[Tiles] = cost.SEARCH
    ) -> dict[str, Emitted] | Refusal:
        """Return by name the separate kernel, and the printable fused kernels with the tile sizes in `search`."""
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
            emitted = print_triton.emit(p, tiled)
        except AltError as cause:
            return Refusal(str(cause))
        reason = trial.refusal(emitted[0])
        return emitted if reason is None else Refusal(reason)

    def _question(self, c: Candidate, emitted: dict[str, Emitted]) -> str:
        """Return all that the times depend on: kernels name no buffers, and contain sizes, layouts and the epilogue.

        The first two kernels appear as text, for readers; all of them by their digest.
        """
        m, sources = c.matmul, [k.source for k, _ in emitted.values()]
        digest = hashlib.sha256("\n".join(sources).encode()).hexdigest()
        assert c.library.extern is not None
        call = (c.library.extern.target, m.batch, m.rows, m.columns, m.depth, m.dtype)
        return "\n".join([self.machine, *map(str, call), ", ".join(emitted), digest, *sources[:2]])

    def runs(self, p: Program, c: Candidate, emitted: dict[str, Emitted]) -> dict[str, tuner.Candidate]:
        """Start compiling all kernels, and return the steps of each candidate by name."""
        jobs = {label: self.compiled(k) for label, (k, _) in emitted.items()}
        call = c.library.extern

        def steps(label: str, k: TritonKernel, buffers: tuple[str, ...]) -> list[Step]:
            launch = (k, buffers, jobs[label])
            return [call, launch] if label == LIBRARY and call is not None else [launch]

        return {label: (p, steps(label, k, buffers)) for label, (k, buffers) in emitted.items()}

    def _best(self, p: Program, deps: Deps, c: Candidate, times: Times) -> tuple[Tiles, str] | Refusal:
        tiles = {str(t): t for t in cost.SEARCH}
        comparison = tuner.compare(times, tiles, LIBRARY, GAIN, "apart")
        if comparison is None:
            return self._default(p, deps, c, "no candidate could be measured")
        best = tiles[comparison.best]
        return (
            (best, comparison.text) if comparison.is_faster else Refusal(f"not faster: {comparison.text} with {best}")
        )

    def _default(self, p: Program, deps: Deps, c: Candidate, reason: str) -> tuple[Tiles, str] | Refusal:
        return Refusal(f"not measured: {reason}") if self.default is None else self.default(p, deps, c)


def chooser(cfg: Config, context: ScheduleContext, p: Program) -> Choose | None:
    """Return the function that chooses for the products of a graph on a GPU, or None if products stay library calls.

    It measures with max_autotune, and asks the cost model otherwise.
    """
    if cfg.matmul_templates == "off":
        return None
    device = next(b.device for b in p.buffers.values() if b.device.type == "cuda")
    if cfg.max_autotune and not cfg.deterministic:
        return product_tuner(cfg, context, device).choose
    return _by_model(cfg, context)


def _by_model(cfg: Config, context: ScheduleContext) -> Choose | None:
    assert isinstance(context.device, Gpu)
    return cost.chooser(cfg, context.device)


def product_tuner(cfg: Config, context: ScheduleContext, device: torch.device) -> ProductTuner:
    """Return the tuner of products on the GPU `device`."""
    return ProductTuner(*tuner.means_of(cfg, context, device), _by_model(cfg, context))
