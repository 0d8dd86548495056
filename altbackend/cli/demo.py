"""`python -m altbackend demo`: compile a few models, and show speed and agreement with eager."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

import altbackend
from altbackend.cli.measure import Call, medians, relative_error, seconds_of
from altbackend.compat.torch_api import unannotated
from altbackend.examples.catalogue import EXAMPLES, Example
from altbackend.lazy_dataclass import dataclass
from altbackend.report.stats import GraphStats, snapshot

MODELS = EXAMPLES
Mode = Literal["inference", "training"]
MODES: tuple[Mode, ...] = ("inference", "training")
# A result may be this many times further from eager than eager is from float64, plus a few float32 roundings.
ROUNDING_FACTOR = 10.0
ROUNDING_FLOOR = 1e-5
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Times are in seconds; `first_call` includes all compilation. `error` is the largest relative difference from
    eager. `rounding` is that of eager from float64: the error that float32 itself has on this model.
    """

    title: str
    mode: Mode
    eager: float
    compiled: float
    error: float
    rounding: float
    first_call: float
    stats: GraphStats

    @property
    def agrees(self) -> bool:
        return self.error <= ROUNDING_FLOOR + ROUNDING_FACTOR * self.rounding


def run(backend: str, models: Sequence[str] | None, device: str, seconds: float) -> int:
    """Print progress and the table. Return 1 if a result is further from eager than rounding explains, else 0."""
    examples = [EXAMPLES[name] for name in models or EXAMPLES]
    target = torch.device(device)
    print(f"backend {backend}, torch {torch.__version__}, {target}, {torch.get_num_threads()} threads", flush=True)
    compiler = backend_named(backend)
    cases = [(example, mode) for example in examples for mode in MODES]
    rows = []
    for number, (example, mode) in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {example.title}, {mode}", flush=True)
        rows.append(measure(example, mode, compiler, target, seconds))
    print(f"\n{table(rows)}", flush=True)
    wrong = [f"{row.title}, {row.mode}" for row in rows if not row.agrees]
    if wrong:
        print(f"\nfurther from eager than rounding explains: {'; '.join(wrong)}", flush=True)
    return int(bool(wrong))


def backend_named(name: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """Return a function that compiles a module. "alt" works without installation too, where torch finds no entry
    point.
    """
    if name != "alt":
        return lambda module: torch.compile(module, backend=name)
    options: dict[str, str | int | bool | Callable[..., object]] = {} if "ALTBACKEND_LOG" in os.environ else {"log": 1}
    return lambda module: torch.compile(module, backend=altbackend.alt, options=options)


def measure(
    example: Example,
    mode: Mode,
    compiler: Callable[[nn.Module], Callable[..., torch.Tensor]],
    device: torch.device,
    seconds: float,
) -> Row:
    """Compile a copy of the example's model and compare it with the original."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = example.model().to(device).train(mode == "training")
    batch = (example.training if mode == "training" else example.inference)().to(device)
    twin = copy.deepcopy(model)
    exact = float64_results(example, mode, model, batch)
    eager = step(example, mode, model, model, batch)
    compiled = step(example, mode, twin, compiler(twin), batch)

    before = snapshot()
    print("    compiling", flush=True)
    first_call, results = seconds_of(compiled, device)
    stats = snapshot() - before
    # Compared after one step each: over further training steps rounding differences grow.
    expected = eager()
    error = relative_error(results, expected)
    rounding = relative_error([value.double() for value in expected], exact)
    print("    measuring", flush=True)
    eager_time, compiled_time = medians(eager, compiled, device, seconds)
    return Row(example.title, mode, eager_time, compiled_time, error, rounding, first_call, stats)


def float64_results(example: Example, mode: Mode, model: nn.Module, batch: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the results of one step of a float64 copy of `model`."""
    exact = copy.deepcopy(model).double()
    return step(example, mode, exact, exact, batch.double() if batch.is_floating_point() else batch)()


def step(
    example: Example, mode: Mode, module: nn.Module, forward: Callable[..., torch.Tensor], batch: torch.Tensor
) -> Call:
    """Return a function that runs one inference or training step of `module` through `forward`.

    It returns the tensors to compare.
    """
    if mode == "inference":

        def infer() -> Sequence[torch.Tensor]:
            with torch.no_grad():
                return [forward(batch)]

        return infer

    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def train() -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = example.loss(forward(batch))
        unannotated(loss.backward)()
        optimizer.step()
        return [loss, *(p.grad for p in module.parameters() if p.grad is not None)]

    return train


HEADS = (
    "model",
    "mode",
    "eager ms",
    "compiled ms",
    "speed-up",
    "rel. error",
    "rounding",
    "kernels",
    "calls",
    "compile s",
    "first s",
)
LEGEND = """\
rel. error: largest difference from eager over outputs (and gradients); rounding: the same of eager from float64;
kernels: generated; calls: left to the library; compile s: inside the backend; first s: the whole first call."""


def table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned table with a legend."""
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], LEGEND])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.title,
        row.mode,
        f"{row.eager * 1e3:.2f}",
        f"{row.compiled * 1e3:.2f}",
        f"{row.eager / row.compiled:.2f}x",
        f"{row.error:.1e}",
        f"{row.rounding:.1e}",
        str(row.stats.kernels),
        str(row.stats.library_calls),
        f"{row.stats.compile_seconds:.2f}",
        f"{row.first_call:.2f}",
    )
