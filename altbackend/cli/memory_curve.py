"""`python -m altbackend memory-curve`: memory and time of a training step against the memory budget."""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import altbackend
from altbackend.cli.measure import relative_error
from altbackend.cli.source import named_value
from altbackend.errors import BadOptionValue
from altbackend.lazy_dataclass import dataclass

Args = tuple[object, ...]


@dataclass(frozen=True)
class Point:
    """One budget: bytes at the step's peak and between forward and backward, seconds of a step.

    `difference`: the largest relative difference of a gradient from the one at the first budget.
    """

    budget: float
    peak: int
    saved: int
    seconds: float
    difference: float


def run(source: str, points: int, steps: int, device: str, output: str) -> int:
    """Measure `FILE.py:function` at `points` budgets from 1 to 0; print a table and draw it as a PNG.

    The function takes nothing and returns (module, inputs). A step adds up the module's results, as a loss, and runs
    the backward.
    """
    if points < 2:
        raise BadOptionValue("--points", points, "it takes a number from 2 on", "the command line")
    module, inputs = named_value(source)()
    module, inputs = module.to(device), tree_map_only(Tensor, lambda x: x.to(device), tuple(inputs))
    measured: list[Point] = []
    print(f"{'budget':>6} {'peak MiB':>9} {'saved MiB':>9} {'ms a step':>9}  gradients differ by")
    for point in curve(module, inputs, [1 - k / (points - 1) for k in range(points)], steps):
        measured.append(point)
        print(
            f"{point.budget:6.2f} {point.peak / 2**20:9.1f} {point.saved / 2**20:9.1f} {point.seconds * 1e3:9.2f}"
            f"  {point.difference:.1e}",
            flush=True,
        )
    print(draw(measured, source, Path(output)))
    return 0


def curve(module: nn.Module, inputs: Args, budgets: Sequence[float], steps: int) -> Iterator[Point]:
    """Yield a point for each budget, from a copy of the module of its own."""
    reference: Sequence[Tensor] = ()
    for budget in budgets:
        torch._dynamo.reset()
        own = Loss(copy.deepcopy(module))
        # a CPU's workspaces are counted only if each call allocates its own
        options: dict[str, Any] = {"activation_memory_budget": budget, "persistent_workspace": False}
        call = torch.compile(own, backend=altbackend.alt, options=options)
        gradients = step(call, own, inputs)
        reference = reference or gradients
        peak, saved = step_memory(call, own, inputs)
        seconds = statistics.median(_timed(partial(step, call, own, inputs)) for _ in range(steps))
        yield Point(budget, peak, saved, seconds, relative_error(gradients, reference))


class Loss(nn.Module):
    """The sum of a module's results. It is compiled with the module, so that no result stays in memory for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: object) -> Tensor:
        results = [x for x in tree_leaves(self.module(*inputs)) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.sum(dtype=torch.float32) for x in results]).sum()


def step(call: Callable[..., Tensor], module: nn.Module, inputs: Args) -> list[Tensor]:
    """Run one training step from a fixed seed; return the gradients of the parameters."""
    torch.manual_seed(0)
    torch.autograd.backward(call(*inputs))
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad(set_to_none=True)
    return gradients


def step_memory(call: Callable[..., Tensor], module: nn.Module, inputs: Args) -> tuple[int, int]:
    """Return the bytes that a step allocates at its peak, and those that are allocated when the forward has ended."""
    device = next(
        itertools.chain(module.parameters(), (x for x in tree_leaves(inputs) if isinstance(x, Tensor)))
    ).device
    recorder = _Cuda(device) if device.type == "cuda" else _Cpu()
    with recorder.record():
        total = call(*inputs)
    forward_peak, saved = recorder.peak, recorder.remaining
    with recorder.record():
        torch.autograd.backward(total)
    module.zero_grad(set_to_none=True)
    return max(forward_peak, saved + recorder.peak), saved


class _Cuda:
    """Measures the memory of a block of code on a GPU, relative to its start."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.remaining = device, 0, 0

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device) - before
        self.remaining = torch.cuda.memory_allocated(self.device) - before


class _Cpu:
    """Measures the memory of a block of code on a CPU, relative to its start, by the allocations that torch reports."""

    def __init__(self) -> None:
        self.peak, self.remaining = 0, 0

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True, acc_events=True) as profile:
            yield
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda e: e.start_ns())
        alive = list(itertools.accumulate((e.nbytes() for e in events), initial=0))
        self.peak, self.remaining = max(alive), alive[-1]


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def draw(points: Sequence[Point], title: str, path: Path) -> str:
    """Draw memory and time against the budget as a PNG. Return one line: where it is, or why there is none."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency, needed only here
    except ImportError:
        return "no picture: matplotlib is not installed"
    figure = Figure(figsize=(7, 4))
    left = figure.subplots()
    budgets = [p.budget for p in points]
    left.plot(budgets, [p.peak / 2**20 for p in points], "o-", color="#1a73e8", label="peak")
    left.plot(budgets, [p.saved / 2**20 for p in points], "s--", color="#1a73e8", label="after the forward")
    left.set_xlabel("activation_memory_budget")
    left.set_ylabel("MiB")
    left.set_ylim(bottom=0)
    right = left.twinx()
    right.plot(budgets, [p.seconds * 1e3 for p in points], "^-", color="#e8710a", label="time of a step (right)")
    right.set_ylabel("ms a step")
    right.set_ylim(bottom=0)
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(handles=lines, loc="lower right")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return f"picture: {path}"
