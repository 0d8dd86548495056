"""The work of one fresh process: compile once, compare with eager, time both in turns."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch._dynamo.utils  # here, so that importing Dynamo counts in no backend's first call
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.cases import Case, find
from benchmarks.records import CHECK_TOLERANCE, Measurement, Request
from benchmarks.subject import Subject, build, compiled, eager, surroundings

MINIMUM_REPETITIONS = 15
MAXIMUM_REPETITIONS = 1000
WARM_UPS = 3
NEIGHBOURS = 6  # moves of the parameters that `spread` tries
SEED = 5  # of the numbers that a model draws while it runs


@dataclass(frozen=True)
class State:
    """Copies of what one call leaves behind."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def measure(request: Request) -> Measurement:
    """Run a request in this process. Whatever the case or the backend raises goes through."""
    if request.task == "check":
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # float32 results are compared to 1e-4
            return _check(request)
    return _time(request)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; infinite where the shapes or dtypes differ, or only `want` is 0."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    a, b = got.detach().double(), want.detach().double()
    difference, norm = float((a - b).norm()), float(b.norm())
    if difference == 0.0 or torch.equal(a, b):
        return 0.0
    return difference / norm if norm != 0.0 else float("inf")


def output_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest relative error over pairs of tensors; NaN if any is NaN, infinite if their number differs."""
    if len(got) != len(want):
        return float("inf")
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    return next((error for error in errors if error != error), max(errors, default=0.0))


def gradient_error(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> float | None:
    """||got - want|| / ||want|| over all gradients as one vector; infinite if one side lacks one.

    AOTAutograd gives zeros to some parameters to which eager gives no gradient; zeros count as none.
    """
    if not want:
        return None
    difference = norm = 0.0
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            if any(t is not None and bool(t.any()) for t in (a, b)):
                return float("inf")
            continue
        difference += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    if difference == 0.0:
        return 0.0
    return float((difference / norm) ** 0.5) if norm != 0.0 else float("inf")


def repetitions(seconds_per_pair: float, budget_seconds: float) -> int:
    """Return the number of pairs of calls that fit the budget, within [15, 1000]."""
    fitting = int(budget_seconds / max(seconds_per_pair, 1e-9))
    return max(MINIMUM_REPETITIONS, min(MAXIMUM_REPETITIONS, fitting))


def _time(request: Request) -> Measurement:
    case = find(request.case)
    built = build(case, request.preset, request)
    plain = eager(case, built, request)
    # Training and steps change the module, so each side needs its own; inference shares one and its memory.
    other = built if request.mode == "inference" else build(case, request.preset, request)
    with surroundings(request):
        want = _state(plain, plain.run())
        got, seconds, fast = _first_call(lambda: compiled(case, other, request), request)
        eager_ms, compiled_ms = _in_turns(plain, fast, request)
        peaks = _peak_bytes(plain, request), _peak_bytes(fast, request)
    errors = output_error(got.outputs, want.outputs), gradient_error(got.gradients, want.gradients)
    return Measurement(seconds, eager_ms, compiled_ms, *errors, *_graphs(), *peaks)


def _check(request: Request) -> Measurement:
    """Two calls on each side, the second with other values of the same shapes, on separate copies of the case."""
    case = find(request.case)
    plain = eager(case, build(case, request.preset, request), request)
    other = build(case, request.preset, request)
    with surroundings(request):
        want = _seeded(plain)
        got, seconds, fast = _first_call(lambda: compiled(case, other, request), request)
        for side in (plain, fast):
            _roll_inputs(side)
        want_again = _seeded(plain)
        got_again = _seeded(fast)
    compared = ((got, want), (got_again, want_again))
    outputs = _worst([output_error(a.outputs, b.outputs) for a, b in compared])
    gradients = [gradient_error(a.gradients, b.gradients) for a, b in compared]
    found = [error for error in gradients if error is not None]
    answer = Measurement(seconds, (), (), outputs, _worst(found) if found else None, *_graphs())
    if answer.worst_error <= CHECK_TOLERANCE or request.mode == "step":
        return answer
    try:
        exact = _exact(case, request)
    except Exception:  # an operator of the model may not take float64
        return answer
    distances = _distance((want, want_again), exact), _distance((got, got_again), exact)
    return replace(answer, exact_errors=distances)


def _exact(case: Case, request: Request) -> tuple[State, State]:
    """Return what the two calls of a check leave behind in float64, computed by eager from the same values."""
    module, args, kwargs = build(case, request.preset, request)
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, (args, kwargs))
    return _two_calls(eager(case, (module.double(), args, kwargs), request), request)


def _two_calls(side: Subject, request: Request) -> tuple[State, State]:
    """Return what a check's two calls leave behind."""
    with surroundings(request):
        first = _seeded(side)
        _roll_inputs(side)
        return first, _seeded(side)


def spread(request: Request) -> float:
    """Return how far eager moves from itself, at most, when its parameters move by up to four roundings.

    The largest error of outputs and gradients, as a check has them, over a few such moves. Where an activation is so
    near to 0 that its sign is a matter of rounding, that is far.
    """
    case = find(request.case)
    want = _two_calls(eager(case, build(case, request.preset, request), request), request)
    return _worst([_distance(_two_calls(_moved(case, request, seed), request), want) for seed in range(NEIGHBOURS)])


def _moved(case: Case, request: Request, seed: int) -> Subject:
    built = build(case, request.preset, request)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in built[0].parameters():
            if p.is_floating_point():
                moves = torch.rand(p.shape, generator=generator).to(p.device) * 8 - 4
                p.mul_(1 + moves * torch.finfo(p.dtype).eps)
    return eager(case, built, request)


def _distance(states: tuple[State, State], exact: tuple[State, State]) -> float:
    """The largest error of outputs and gradients of two calls, against float64's."""
    found: list[float] = []
    for s, e in zip(states, exact, strict=True):
        found.append(output_error(tuple(map(_wide, s.outputs)), tuple(map(_wide, e.outputs))))  # a loss may be float32
        gradients = gradient_error(s.gradients, e.gradients)
        found += [] if gradients is None else [gradients]
    return _worst(found)


def _wide(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _worst(errors: list[float]) -> float:
    return next((error for error in errors if error != error), max(errors))


def _roll_inputs(side: Subject) -> None:
    for leaf in pytree.tree_leaves((side.args, side.kwargs)):
        if isinstance(leaf, Tensor):
            leaf.data.copy_(leaf.detach().roll(1, -1))


def _first_call(make: Callable[[], Subject], request: Request) -> tuple[State, float, Subject]:
    torch._dynamo.utils.counters.clear()
    _wait(request.device)
    start = time.perf_counter()
    side = make()
    torch.manual_seed(SEED)
    output = side.run()
    _wait(request.device)
    seconds = time.perf_counter() - start
    return _state(side, output), seconds, side


def _seeded(side: Subject) -> State:
    """Return what a call leaves that draws its random numbers, if any, after the seed of the first call."""
    torch.manual_seed(SEED)
    return _state(side, side.run())


def _state(side: Subject, output: Any) -> State:
    outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if not outputs:
        outputs = list(side.module.parameters())
    outputs += list(side.module.buffers()) if side.training else []
    gradients = tuple(_copy(leaf.grad) for leaf in side.leaves) if side.training else ()
    copies = tuple(tensor.detach().clone() for tensor in outputs)
    side.clear()
    return State(copies, gradients)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _graphs() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def _in_turns(plain: Subject, fast: Subject, request: Request) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Milliseconds of eager and compiled calls, alternating, so that drift of the machine meets both."""
    clock = _cuda_ms if request.device.startswith("cuda") else cpu_ms
    pairs = [(clock(plain), clock(fast)) for _ in range(WARM_UPS)]
    per_pair = median(a + b for a, b in pairs) / 1e3
    count = request.repetitions or repetitions(per_pair, request.seconds)
    gc.collect()
    gc.disable()
    try:
        pairs = [(clock(plain), clock(fast)) for _ in range(count)]
    finally:
        gc.enable()
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def cpu_ms(side: Subject) -> float:
    """Milliseconds of one call on a CPU."""
    side.clear()
    start = time.perf_counter()
    output = side.run()
    end = time.perf_counter()
    del output  # freed outside the clock
    return (end - start) * 1e3


def _cuda_ms(side: Subject) -> float:
    """From an idle device to the last kernel's end: launching counts where it is not hidden."""
    side.clear()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    output = side.run()
    end.record()
    torch.cuda.synchronize()
    del output
    return float(start.elapsed_time(end))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _peak_bytes(side: Subject, request: Request) -> int | None:
    if not request.device.startswith("cuda"):
        return None
    side.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    output = side.run()
    torch.cuda.synchronize()
    del output
    side.clear()
    return int(torch.cuda.max_memory_allocated() - held)
