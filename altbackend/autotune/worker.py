"""The process that times candidates on a GPU: `python -m altbackend.autotune.worker DEVICE`.

Each line of its input is the path of a trial (`autotune.trial`, in JSON). Each line of its output is the answer:
`{"microseconds": x}` or `{"error": text}`. After an error of the device, which persists in the process, the answer
contains `"ended": true` and the process ends. It also ends when its input closes, so it does not outlive its parent.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from ..compat.torch_api import unannotated
from ..runtime.cuda import Cubin, Tables, load, stream
from .trial_data import StepData, Trial, ViewData

ROUNDS = 7  # timed replays; their median counts
ROUND_US = 3000.0  # target duration of a replay
MOST_REPEATS = 100

Step = Callable[[], object]


def measure(trial: Trial, device: torch.device) -> float:
    """Return the microseconds of one run of the trial's steps, from replays of a CUDA graph that holds several runs."""
    buffers = {name: _filled(dtype, n, device) for name, (dtype, n) in trial["buffers"].items()}
    steps = [step(s, buffers, device) for s in trial["steps"]]
    torch.cuda.synchronize()
    side = unannotated(torch.cuda.Stream)(device)
    with torch.cuda.stream(side):
        _run(steps)  # the first call of a library allocates its workspace
        once = _events_us(lambda: _run(steps))
        repeats = int(min(max(ROUND_US / max(once, 0.1), 1), MOST_REPEATS))
        return _graph_us(steps, repeats) / repeats


def step(s: StepData, buffers: dict[str, torch.Tensor], device: torch.device) -> Step:
    """Return a function that runs one launch or library call on the given buffers."""
    return library_call(s, buffers) if "operator" in s else _launch(s, buffers, device)


def library_call(s: StepData, buffers: dict[str, torch.Tensor]) -> Step:
    operator = getattr(torch.ops.aten, s["operator"]).out
    args = [_view(a, buffers) if isinstance(a, dict) else a for a in s["args"]]
    left, right = args[-2:]
    assert isinstance(left, torch.Tensor), "a product ends with its operands"
    assert isinstance(right, torch.Tensor), "a product ends with its operands"
    out = buffers[s["out"]].view(*left.shape[:-1], right.shape[-1])
    return lambda: operator(*args, **s["kwargs"], out=out)


def _view(a: ViewData, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    return buffers[a["buffer"]].as_strided(a["sizes"], a["strides"], a["offset"])


def _launch(s: StepData, buffers: dict[str, torch.Tensor], device: torch.device) -> Step:
    launch = load(Cubin(base64.b64decode(s["cubin"]), s["shared"], s["warps"], s["name"]), "a candidate")
    names = s["buffers"]
    fixed = {k: buffers[b] for k, b in enumerate(names)}
    table = Tables(len(names), 0, [[("p", k) for k in range(len(names))]], fixed).make()
    alive = (table, fixed)  # the launch reads its arguments from the table's memory

    def run() -> None:
        launch(s["grid"], stream(device.index), alive[0].launches[0])

    return run


def _filled(dtype: str, elements: int, device: torch.device) -> torch.Tensor:
    """Return a buffer of random numbers, since multiplying zeros draws less power and runs faster. Integers are 0."""
    out = torch.zeros(elements, dtype=getattr(torch, dtype), device=device)
    return out.normal_() if out.is_floating_point() else out


def _run(steps: list[Step]) -> None:
    for s in steps:
        s()


def _graph_us(steps: list[Step], repeats: int) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(repeats):
            _run(steps)
    graph.replay()
    return statistics.median(_events_us(graph.replay) for _ in range(ROUNDS))


def _events_us(run: Step) -> float:
    """Return the microseconds between two events around `run`."""
    begin, end = (unannotated(torch.cuda.Event)(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _answer(path: str, device: torch.device) -> dict[str, object]:
    try:
        return {"microseconds": measure(json.loads(Path(path).read_text()), device)}
    except Exception as cause:
        return {"error": "".join(traceback.format_exception_only(cause))[-2000:].strip()}


def _usable(device: torch.device) -> bool:
    """Return whether the device still answers; after an illegal access it does not, in this process."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    device = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    with torch.no_grad():
        for line in sys.stdin:
            answer = _answer(line.rstrip("\n"), device)
            usable = _usable(device)
            answers.write(json.dumps(answer if usable else answer | {"ended": True}) + "\n")
            answers.flush()
            if not usable:
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
