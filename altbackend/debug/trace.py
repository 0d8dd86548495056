"""The trace of one compilation: timings, the text of every stage, and decisions with their reasons.

Each compiled graph has one `Trace`, which is passed explicitly to each stage. Without debug options it costs two clock
reads per stage, and no text is made.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Literal

from altbackend.config.options import Config
from altbackend.debug.torch_logs import artifact_logger, structured_artifact, structured_enabled
from altbackend.errors import DebugFolderWarning
from altbackend.lazy_dataclass import dataclass

# Levels of option `log`.
TIMINGS, DECISIONS, GRAPHS, SOURCE, IR = 1, 2, 3, 4, 5

Kind = Literal["graph", "output_code", "kernel_code", "ir_pre_fusion", "ir_post_fusion", "schedule", "other"]


@dataclass(frozen=True)
class Sink:
    """The output of a kind of artifact besides the debug folder: a level of option `log`, and a TORCH_LOGS name."""

    rung: int
    torch_log: str


SINKS: Mapping[Kind, Sink] = MappingProxyType(
    {
        "graph": Sink(GRAPHS, "post_grad_graphs"),
        "output_code": Sink(SOURCE, "output_code"),
        "kernel_code": Sink(SOURCE, "kernel_code"),
        "ir_pre_fusion": Sink(IR, "ir_pre_fusion"),
        "ir_post_fusion": Sink(IR, "ir_post_fusion"),
        "schedule": Sink(DECISIONS, "schedule"),
        "other": Sink(IR, ""),
    }
)


class DecisionKind(str, Enum):
    """The kinds of decisions. The value is the text in `decisions.txt`."""

    HORIZONTAL_FUSION = "horizontal fusion"
    CACHE = "cache"
    CHECKS = "checks"
    CUDAGRAPHS = "cudagraphs"
    DEVICE = "device"
    FREEZING = "freezing"
    FUSION = "fusion"
    GRAPH = "graph"
    HOST = "host program"
    KERNEL = "kernel"
    LAYOUT = "layout"
    LOWERING = "lowering"
    PARTITION = "partition"
    PERF_HINT = "perf_hint"
    QUANTISED = "quantised"
    RANDOM = "random"
    REPRO = "repro"
    SCHEDULE = "schedule"
    SIMPLIFY = "simplify"
    SUBGRAPH = "subgraph"
    TEMPLATE = "template"
    TILES = "tiles"
    WARM_START = "warm start"

    def __str__(self) -> str:
        return self.value


# TORCH_LOGS names of decision kinds; other kinds only reach stderr and the debug folder.
DECISION_LOGS: Mapping[DecisionKind, str] = MappingProxyType(
    {DecisionKind.FUSION: "fusion", DecisionKind.SCHEDULE: "schedule", DecisionKind.PERF_HINT: "perf_hints"}
)


@dataclass(frozen=True)
class Decision:
    """One decision of the compiler: its kind and subject, the verdict, and the reason."""

    kind: DecisionKind
    subject: str
    verdict: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.verdict} ({self.reason})"


class Trace:
    """The record of one graph's compilation.

    `timings` maps a stage's path ("codegen", or "codegen/print" for a nested stage) to seconds, summed over
    repetitions. `decisions` are in the order in which they were made. `folder` is None unless `cfg.debug_dir` is
    set.
    """

    def __init__(self, graph_name: str, cfg: Config) -> None:
        self.graph_name = graph_name
        self.cfg = cfg
        self.timings: dict[str, float] = {}
        self.decisions: list[Decision] = []
        self.folder = Path(cfg.debug_dir).expanduser() / _file_name(graph_name) if cfg.debug_dir else None
        self._open: list[str] = []
        self._written = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the stage inside the context. Stages nest."""
        self._open.append(name)
        path = "/".join(self._open)
        self.timings.setdefault(path, 0.0)  # an outer stage is listed before its inner ones
        start = perf_counter()
        try:
            yield
        finally:
            self.timings[path] += perf_counter() - start
            self._open.pop()

    def artifact(self, name: str, text: Callable[[], str], kind: Kind = "other") -> None:
        """Offer a stage's text. `text` is called at most once, and only if an output asks for it.

        The text is written to the debug folder as `NN_name`, printed if option `log` is at least
        `SINKS[kind].rung`, and given to torch's logs.
        """
        sink = SINKS[kind]
        logger = artifact_logger(sink.torch_log) if sink.torch_log else None
        printed = self.cfg.log >= sink.rung
        structured = structured_enabled()
        if not (self.folder or printed or logger or structured):
            return
        content = text()
        if self.folder:
            self._write(f"{self._written:02d}_{_file_name(name)}", content)
            self._written += 1
        if printed:
            self._print(f"{name}\n{content}")
        if logger:
            logger.debug("%s %s\n%s", self.graph_name, name, content)
        if structured:
            structured_artifact(f"{self.graph_name}_{name}", lambda: content)

    def decision(self, kind: DecisionKind, subject: str, verdict: str, reason: str) -> None:
        """Record why the compiler did something or did not do it."""
        entry = Decision(kind, subject, verdict, reason)
        self.decisions.append(entry)
        if self.cfg.log >= DECISIONS:
            self._print(str(entry))
        logger = artifact_logger(DECISION_LOGS[kind]) if kind in DECISION_LOGS else None
        if logger:
            logger.debug("%s %s", self.graph_name, entry)

    def seconds(self) -> float:
        """Return the total seconds of the outermost stages."""
        return sum(spent for path, spent in self.timings.items() if "/" not in path)

    def timings_text(self) -> str:
        """Return one line per stage in milliseconds, nested stages indented; then the total."""
        rows = [("  " * path.count("/") + path.rpartition("/")[2], spent) for path, spent in self.timings.items()]
        rows.append(("total", self.seconds()))
        return "".join(f"{label:<32}{spent * 1e3:10.3f} ms\n" for label, spent in rows)

    def write(self) -> None:
        """Write `timings.txt` and `decisions.txt` as they are now, if there is a debug folder."""
        if self.folder:
            self._write("timings.txt", self.timings_text())
            self._write("decisions.txt", "".join(f"{entry}\n" for entry in self.decisions))

    def finish(self) -> None:
        """End the record: write `timings.txt` and `decisions.txt`, and print the line of log level 1."""
        self.write()
        if self.cfg.log >= TIMINGS:
            stages = ", ".join(f"{path} {s * 1e3:.1f}" for path, s in self.timings.items() if "/" not in path)
            self._print(f"compiled in {self.seconds() * 1e3:.1f} ms ({stages})")

    def _print(self, text: str) -> None:
        print(f"altbackend: {self.graph_name}: {text}", file=sys.stderr, flush=True)

    def _write(self, name: str, content: str) -> None:
        """Write a file. If the debug folder cannot be written, warn once and go on without it."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(content, encoding="utf-8")
        except OSError as cause:
            self.folder = None
            message = f"debug folder {self.cfg.debug_dir} cannot be written ({cause}); compiling without it"
            warnings.warn(message, DebugFolderWarning, stacklevel=3)


def _file_name(name: str) -> str:
    """Return `name` with every character replaced that a file system may refuse."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
    return cleaned if cleaned.strip(".") else f"_{cleaned}"
