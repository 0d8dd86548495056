"""Measure one drawn program in this process: eager, and the compilers beside it."""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from filelock import FileLock

from altbackend import alt
from benchmarks.rivals.errors import errors
from benchmarks.rivals.program import Call, largest_error, prepare
from benchmarks.workers import ANSWER

ROUNDS, MOST_ROUNDS, SECONDS = 7, 60, 0.4  # of alternating calls
WARM_UPS = 3
BACKENDS: dict[str, Any] = {"inductor": "inductor", "alt": alt}
# whether float32 products, and convolutions, may round to TF32; torch's own setting is "convolutions"
TF32 = {"all": (True, True), "convolutions": (False, True), "none": (False, False)}
DYNAMO: dict[str, Any] = {"dynamo": "eager"}  # eager's kernels behind Dynamo's guards: no backend is faster to start


@dataclass
class Result:
    """Figures of one program by backend: median milliseconds, seconds of the first call, error and peak bytes."""

    text: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the program `request["text"]`; `request["lock"]` is the file that one measurement holds.

    With `request["errors_only"]`, only errors are figures, and nothing is timed. With `request["dynamo"]`, eager's
    kernels behind Dynamo are timed too. `request["tf32"]` names one of `TF32`.
    """
    torch._dynamo.reset()
    device = torch.device(request["device"])
    _free_memory(device)
    result = Result(request["text"])
    if request.get("errors_only"):
        result.errors = errors(result.text, device)
        return asdict(result)
    products, convolutions = TF32[request.get("tf32", "all")]
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
    calls = _calls(device, result, BACKENDS | DYNAMO if request.get("dynamo") else BACKENDS)
    _free_memory(device)
    with FileLock(request["lock"]):
        _time(calls, device, result)
    return asdict(result)


def _free_memory(device: torch.device) -> None:
    """Give back the memory that no tensor has: the process that measures needs it, and the library its workspaces."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _calls(device: torch.device, result: Result, backends: dict[str, Any]) -> dict[str, Call]:
    """Return eager and the compiled programs that ran once; their first calls and errors go into `result`."""
    subject = prepare(result.text, device)
    model = subject.model
    before = {name: b.clone() for name, b in model.named_buffers()}
    calls = {"eager": subject.call(model)}
    expected = subject.reference()
    result.errors["eager"] = largest_error(calls["eager"](), expected)
    for name, backend in backends.items():
        call = subject.call(torch.compile(model, backend=backend, dynamic=False))
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
        result.errors[name] = largest_error(got, expected)
        calls[name] = call
    return calls


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
