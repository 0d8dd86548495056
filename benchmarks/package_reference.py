"""The process of the reference for benchmarks.packages: `build`, `load` and `call` on request, line for line in JSON.

The reference runs beside nothing of ours: if its library crashes, the results of ours stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.cases import find
from benchmarks.workers import ANSWER, Ended, Worker

LIMIT = 1200.0  # seconds: far more than the reference takes for the largest case
STEPS = {"build": "it was built", "load": "it was loaded", "call": "its first call returned"}
CRASH_HINT = "a C++ compiler that links libstdc++ into libraries is one reason: set CXX to another"


@dataclass(frozen=True)
class Exported:
    """A model, its inputs and its exported program on a device."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    program: torch.export.ExportedProgram


def exported(name: str, device: str) -> Exported:
    """Return a case of that name, in its size for CPUs."""
    module, args, kwargs = find(name).build("cpu")
    model: nn.Module = module.eval().to(device)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), (tuple(args), dict(kwargs or {})))
    return Exported(model, args, kwargs, torch.export.export(model, args, kwargs))


def wait(device: str) -> None:
    """Wait for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """Return the time of a call after another one, since other processes use the device in between."""
    call()
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return (time.perf_counter() - start) * 1e3


def error(got: Any, want: Any) -> float:
    """Return the largest difference of two results, relative to the largest number of a tensor."""
    pairs = zip(_tensors(got), _tensors(want), strict=True)
    return max(float((g - w).abs().max() / (w.abs().max() + 1e-30)) for g, w in pairs)


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


# --- what benchmarks.packages asks -----------------------------------------------------------------------------------


class ReferenceEnded(Exception):
    """The process died, or the step raised; the text says at which step."""


class Reference:
    """The package of the reference for one case, in a process that this object starts and ends."""

    def __init__(self, name: str, device: str) -> None:
        command = [sys.executable, "-m", "benchmarks.package_reference", name, device]
        self._worker = Worker(command)

    def ask(self, step: str) -> float:
        """Take a step and return its number: seconds to build or load, milliseconds of a call."""
        answer = self._worker.ask(step, LIMIT)
        if isinstance(answer, Ended):
            raise ReferenceEnded(ending(step, answer))
        if "raised" in answer:
            raise ReferenceEnded(f"reference raised before {STEPS[step]}: {answer['raised']}")
        return float(answer["number"])

    def stop(self) -> None:
        self._worker.stop()


def ending(step: str, end: Ended) -> str:
    """Return a line for a process that did not finish a step."""
    how = f"was stopped after {LIMIT:.0f} s" if end.late else f"died ({end.words})"
    hint = f"; {CRASH_HINT}" if "status -11" in end.words or "status -6" in end.words else ""
    return f"reference {how} before {STEPS[step]}{hint}"


# --- the process -----------------------------------------------------------------------------------------------------


class _Served:
    def __init__(self, name: str, device: str, folder: str) -> None:
        self.case, self.device, self.path = exported(name, device), device, str(Path(folder) / "reference.pt2")
        self.loaded: Callable[..., Any] | None = None
        small = nn.Linear(2, 2).to(device)
        program = torch.export.export(small, (torch.ones(1, 2, device=device),))
        torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/small.pt2")  # what all packages share

    def build(self) -> float:
        return _seconds(lambda: torch._inductor.aoti_compile_and_package(self.case.program, package_path=self.path))

    def load(self) -> float:
        def load() -> None:
            self.loaded = torch._inductor.aoti_load_package(self.path)

        return _seconds(load)

    def call(self) -> float:
        assert self.loaded is not None, "load comes before call"
        loaded = self.loaded
        return milliseconds(lambda: loaded(*self.case.args, **self.case.kwargs), self.device)


def _seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def serve(name: str, device: str) -> None:
    """Answer each line, the name of a step, until the input ends."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        served = _Served(name, device, folder)
        steps = {"build": served.build, "load": served.load, "call": served.call}
        for line in sys.stdin:
            answer: dict[str, float | str]
            try:
                answer = {"number": steps[json.loads(line)]()}
            except Exception as cause:
                answer = {"raised": (str(cause) or type(cause).__name__).splitlines()[0]}
            print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
