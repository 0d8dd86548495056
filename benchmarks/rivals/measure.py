"""Measure one drawn program in this process: eager, and the compilers beside it."""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from altbackend import alt
from benchmarks.measure import relative_error
from benchmarks.rivals.grammar import DTYPES, Chain, Program, parse
from benchmarks.workers import ANSWER

ROUNDS, MOST_ROUNDS, SECONDS = 7, 60, 0.4  # of alternating calls
WARM_UPS = 3
SEED = 7
BACKENDS: dict[str, Any] = {"inductor": "inductor", "alt": alt}


@dataclass
class Result:
    """Figures of one program by backend: median milliseconds, seconds of the first call, error and peak bytes."""

    text: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Upstream:
    """The gradient of a program's result: random numbers, the same for every compiler."""

    value: Tensor | None = None

    def get(self, y: Tensor) -> Tensor:
        """Return a gradient like `y`."""
        if self.value is None:
            generator = torch.Generator(y.device).manual_seed(SEED)
            self.value = torch.empty_like(y, requires_grad=False).normal_(generator=generator)
        return self.value.to(y.dtype)


Call = Callable[[], list[Tensor]]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the program `request["text"]`; `request["lock"]` is the file that one measurement holds."""
    program = parse(request["text"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(SEED)
    torch._dynamo.reset()
    gc.collect()
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    result = Result(program.text)
    calls = _calls(program, device, result)
    with FileLock(request["lock"]):
        _time(calls, device, result)
    return asdict(result)


def _calls(program: Program, device: torch.device, result: Result) -> dict[str, Call]:
    """Return eager and the compiled programs that ran once; their first calls and errors go into `result`."""
    training = program.mode == "training"
    with torch.device(device):
        model = Chain(program).to(DTYPES[program.dtype]).train(training)
        x = torch.randn(program.shape, dtype=DTYPES[program.dtype])
    if program.layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x.requires_grad_(training)
    before = {name: b.clone() for name, b in model.named_buffers()}
    upstream = Upstream()
    calls = {"eager": _call(model, model, x, upstream)}
    expected = _reference(model, x, upstream)
    result.errors["eager"] = _error(calls["eager"](), expected)
    for name, backend in BACKENDS.items():
        call = _call(torch.compile(model, backend=backend, dynamic=False), model, x, upstream)
        for b, value in before.items():
            model.get_buffer(b).copy_(value)
        begin = time.perf_counter()
        try:
            got = call()
            _synchronise(device)
        except Exception as cause:  # a program that one compiler refuses is a figure too
            result.failures[name] = f"{type(cause).__name__}: {str(cause)[:200]}"
            continue
        result.first_seconds[name] = time.perf_counter() - begin
        result.errors[name] = _error(got, expected)
        calls[name] = call
    return calls


def _reference(model: Chain, x: Tensor, upstream: Upstream) -> list[Tensor]:
    """Return the results and gradients of eager in float32 without TF32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        exact = copy.deepcopy(model).float()
        return _call(exact, exact, x.detach().float().requires_grad_(x.requires_grad), upstream)()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


def _error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error over the tensors."""
    pairs = zip(got, expected, strict=True)
    return max(relative_error(a.to(b.dtype), b) for a, b in pairs)


def _call(function: Callable[[Tensor], Tensor], model: Chain, x: Tensor, upstream: Upstream) -> Call:
    leaves = [x, *model.parameters()]

    def infer() -> list[Tensor]:
        with torch.no_grad():
            return [function(x)]

    def train() -> list[Tensor]:
        y = function(x)
        gradients = torch.autograd.grad(y, leaves, upstream.get(y), allow_unused=True)
        return [y, *(g for g in gradients if g is not None)]

    return train if x.requires_grad else infer


def _time(calls: dict[str, Call], device: torch.device, result: Result) -> None:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            call()
        result.peak_bytes[name] = peak_bytes(call, device)
    begin = time.perf_counter()
    while len(times["eager"]) < ROUNDS or (time.perf_counter() - begin < SECONDS and len(times["eager"]) < MOST_ROUNDS):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
    result.milliseconds = {name: median(values) for name, values in times.items()}


def peak_bytes(call: Call, device: torch.device) -> int:
    """Return the bytes that a call needs beyond what is allocated before it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated() - before)


def milliseconds(call: Call, device: torch.device) -> float:
    """Return the time of one call, from an idle device to the end of its last kernel."""
    _synchronise(device)
    begin = time.perf_counter()
    call()
    _synchronise(device)
    return (time.perf_counter() - begin) * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Answer requests, a line of JSON each, until the input ends."""
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception as cause:  # the program's own error, or the device's: a new process takes the next one
            answer = {"failed": f"{type(cause).__name__}: {str(cause)[:200]}", "broken": True}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
