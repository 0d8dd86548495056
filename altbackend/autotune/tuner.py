"""The part of tuning that products and tiles share: compile candidates, time them, and store their times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch

from altbackend.lazy_dataclass import dataclass

from .. import __version__
from ..codegen.triton.print_triton import TritonKernel
from ..compat import torch_api
from ..compile_pool import cuda as compile_cuda
from ..config.options import Config
from ..disk_cache.storage import open_store
from ..errors import AltError
from ..ir.loops import Extern, Program
from ..runtime.cuda import Cubin
from ..schedule.device import ScheduleContext
from . import measure, trial
from .measure import TrialFailed
from .measured_times import MeasuredTimes, Times
from .trial_data import Trial

logger = logging.getLogger(__name__)

Compile = Callable[[TritonKernel], "Future[Cubin]"]
# A library call; or a kernel, the program's buffers that its parameters stand for, and its machine code.
Step = Extern | tuple[TritonKernel, tuple[str, ...], "Future[Cubin]"]
Candidate = tuple[Program, Sequence[Step]]


@dataclass(frozen=True)
class Tuner:
    """Compiles and times candidates for one GPU.

    `machine`: all that times depend on besides the code. `compiled` starts the compilation of a kernel. `measured`
    returns the microseconds of a trial, or raises TrialFailed or MeasurerDied.
    """

    context: ScheduleContext
    machine: str
    compiled: Compile
    measured: Callable[[Trial], float]
    store: MeasuredTimes

    def times(self, question: str, candidates: Callable[[], Mapping[str, Candidate]]) -> Times:
        """Return the microseconds of the candidates that compile and run, by name; stored or measured now.

        One process at a time measures a question. Raise MeasurerDied.
        """
        with self.store.lock(question):
            if (times := self.store.read(question)) is not None:
                return times
            times = self.measure(candidates())
            self.store.write(question, times)
            return times

    def measure(self, candidates: Mapping[str, Candidate]) -> Times:
        """Return the microseconds of the candidates that compile and run, by name. Raise MeasurerDied."""
        measured = {label: self._time(label, *candidate) for label, candidate in candidates.items()}
        return {label: us for label, us in measured.items() if us is not None}

    def _time(self, label: str, p: Program, steps: Sequence[Step]) -> float | None:
        try:
            ready = [s if isinstance(s, Extern) else (s[0], s[1], s[2].result()) for s in steps]
            return self.measured(trial.of(p, ready))
        except (TrialFailed, AltError) as cause:
            logger.debug("candidate %s is left out: %s", label, cause)
            return None


@dataclass(frozen=True)
class Comparison:
    """The fastest candidate, whether it beats the baseline, and both times as text."""

    best: str
    is_faster: bool
    text: str


def compare(times: Times, names: Iterable[str], baseline: str, gain: float, described: str) -> Comparison | None:
    """Compare the fastest of `names` with a baseline, which it must beat by the factor `gain`.

    `described` says what the baseline is. Return None if neither was measured.
    """
    measured = [name for name in names if name in times]
    if baseline not in times or not measured:
        return None
    best, limit = min(measured, key=times.__getitem__), times[baseline]
    return Comparison(best, times[best] < gain * limit, f"{times[best]:.1f} us measured, {limit:.1f} us {described}")


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn that choices are made without measuring. Only the first call of a process warns."""
    if not _warned:
        logger.warning("max_autotune chooses without measuring: %s", text)
    _warned.add(text)


Means = tuple[ScheduleContext, str, Compile, Callable[[Trial], float], MeasuredTimes]


def means_of(cfg: Config, context: ScheduleContext, device: torch.device) -> Means:
    """Return the fields of a `Tuner` for the GPU `device`."""
    capability = torch_api.cuda_capability(device)

    def compiled(k: TritonKernel) -> Future[Cubin]:
        return compile_cuda.submit(compile_cuda.job_of(k, range(len(k.params)), capability), cfg)

    versions = (torch_api.cuda_name(device), torch.__version__, compile_cuda.triton_version(), __version__)
    store = open_store(cfg)
    times = MeasuredTimes(store.folder / "autotune", read_only=tuple(f / "autotune" for f in store.read_only))
    return context, " ".join(versions), compiled, measure.on_device(device.index or 0), times
