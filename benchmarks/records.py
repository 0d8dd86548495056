"""The request to one fresh process, its answer, and the rows made of answers. All are plain data."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.cases import Mode, Preset

Task = Literal["time", "check"]


@dataclass(frozen=True)
class Request:
    """One (case, backend) for one process.

    dtype: name of a torch dtype. repetitions: None lets the time per call decide. seconds: about how long the
    repetitions may take. options: torch.compile's options; the key "mode" is torch.compile's mode.
    """

    case: str
    backend: str
    mode: Mode = "inference"
    preset: Preset = "cpu"
    device: str = "cpu"
    dtype: str = "float32"
    task: Task = "time"
    repetitions: int | None = None
    seconds: float = 10.0
    options: dict[str, Any] = field(default_factory=dict)


CHECK_TOLERANCE = 1e-4  # relative error of float32 results that a check passes without asking float64


@dataclass(frozen=True)
class Measurement:
    """The answer of one process.

    compile_seconds: from before torch.compile to the end of the first call (in training: forward and backward).
    eager_ms, compiled_ms: every repetition, in order; empty when only checking.
    output_error, gradient_error: ||compiled - eager|| / ||eager||, the largest over the outputs (with the buffers, or
        in a "step" the parameters) and the one over all gradients together; None without gradients.
    graphs, graph_breaks: as Dynamo counts them.
    eager_peak_bytes, compiled_peak_bytes: device memory that one call takes above what
        was held before it; None on the CPU.
    exact_errors: in a check whose errors are above the tolerance, how far eager and compiled are from float64.
    """

    compile_seconds: float
    eager_ms: tuple[float, ...]
    compiled_ms: tuple[float, ...]
    output_error: float
    gradient_error: float | None
    graphs: int
    graph_breaks: int
    eager_peak_bytes: int | None = None
    compiled_peak_bytes: int | None = None
    exact_errors: tuple[float, float] | None = None

    @property
    def speedup(self) -> float:
        return median(self.eager_ms) / median(self.compiled_ms)

    @property
    def worst_error(self) -> float:
        errors = [self.output_error] if self.gradient_error is None else [self.output_error, self.gradient_error]
        return next((error for error in errors if error != error), max(errors))  # NaN wins


@dataclass(frozen=True)
class Failure:
    """A process that crashed, raised or ran out of time. summary: one line. log: the end of its error stream."""

    summary: str
    log: str = ""


@dataclass(frozen=True)
class Row:
    """Everything measured of one (case, backend): one cold and one warm process per round."""

    case: str
    backend: str
    mode: Mode
    cold: tuple[Measurement, ...] = ()
    warm: tuple[Measurement, ...] = ()
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and bool(self.cold)

    @property
    def cold_seconds(self) -> float | None:
        return _median(process.compile_seconds for process in self.cold)

    @property
    def warm_seconds(self) -> float | None:
        return _median(process.compile_seconds for process in self.warm)

    @property
    def eager_ms(self) -> float | None:
        return _median(median(process.eager_ms) for process in self.cold + self.warm)

    @property
    def compiled_ms(self) -> float | None:
        return _median(median(process.compiled_ms) for process in self.cold + self.warm)

    @property
    def speedups(self) -> tuple[float, ...]:
        """Eager over compiled time, one per process: both sides of a ratio share a process."""
        return tuple(process.speedup for process in self.cold + self.warm)

    @property
    def speedup(self) -> float | None:
        return _median(self.speedups)

    @property
    def worst_error(self) -> float | None:
        errors = [process.worst_error for process in self.cold + self.warm]
        return next((error for error in errors if error != error), max(errors, default=None))


def _median(values: Any) -> float | None:
    found = list(values)
    return median(found) if found else None


def write_json(path: Path, record: Request | Measurement | Failure) -> None:
    path.write_text(json.dumps(asdict(record)))


def read_request(path: Path) -> Request:
    return Request(**json.loads(path.read_text()))


def read_answer(path: Path) -> Measurement | Failure:
    """Return what a worker wrote; ValueError or OSError if it wrote nothing whole."""
    data = json.loads(path.read_text())
    if "summary" in data:
        return Failure(**data)
    lists = ("eager_ms", "compiled_ms", "exact_errors")
    fields: dict[str, Any] = {k: tuple(v) if k in lists and v is not None else v for k, v in data.items()}
    return Measurement(**fields)
