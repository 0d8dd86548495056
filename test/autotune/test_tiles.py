"""Variants of a kernel's blocks: each right, and the fastest taken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.autotune.measure import MeasurerDied, TrialFailed
from altbackend.autotune.measured_times import MeasuredTimes
from altbackend.autotune.tiles import RULES, TileTuner
from altbackend.autotune.trial_data import Trial
from altbackend.codegen.triton import print_triton
from altbackend.codegen.triton.print_triton import Emitted, TritonKernel
from altbackend.ir.loops import Extern
from altbackend.runtime.cuda import Cubin
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.tiling.gpu import blocks
from altbackend.schedule.tiling.gpu.tiled import TiledKernel, tile_kernel, tile_steps
from test import triton_run
from test.graphs import Scheduled, schedule, trace

GPU = ScheduleContext(H200)
T = torch.Tensor


def r(*sizes: int) -> T:
    return torch.randn(sizes)


def norm(x: T) -> T:
    return F.layer_norm(x, (x.shape[-1],)) * 2


def weights(x: T) -> tuple[T, T]:
    y = F.softmax(x, -1)
    return y.sum(0), y.amax(1)


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "flat": (lambda x: F.gelu(x) + 1, (40, 300)),
    "rows": (norm, (37, 200)),
    "persistent": (weights, (130, 64)),
    "flat slices": (lambda x: x.exp().sum(), (300, 70)),
    "columns": (lambda x: x.cumsum(0).sum(0), (50, 40)),
    "transpose": (lambda x: x.t().contiguous() * 2, (96, 100)),
}


def scheduled(fn: Callable[..., Any], *inputs: T) -> Scheduled:
    (gm,) = trace(fn, *inputs)
    return schedule(gm, None, GPU)


def emitted(s: Scheduled) -> list[Emitted]:
    kernels = [k for k in s.steps if not isinstance(k, Extern)]
    steps = tile_steps(s.program, s.deps, kernels, GPU, lambda *a: None)
    return [(k, *print_triton.emit(s.program, k)) for _, tiled in steps if isinstance(tiled, list) for k in tiled]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(CASES))
def test_every_variant_is_right(name: str) -> None:
    fn, sizes = CASES[name]
    torch.manual_seed(0)
    x = r(*sizes)
    s = scheduled(fn, x)
    want = fn(x)
    count = 0
    for position, (tiled, *_) in enumerate(first := emitted(s)):
        for b in blocks.variants(tiled.blocks):
            steps: list[Any] = [(kernel, buffers) for _, kernel, buffers in first]
            steps[position] = print_triton.emit(s.program, tile_kernel(s.program, tiled.kernel, GPU, b))
            got = triton_run.run(s.program, steps, [x], s.constants)
            torch.testing.assert_close(tuple(got), want if isinstance(want, tuple) else (want,))
            count += 1
    assert count >= 2


def compiled(kernel: TritonKernel) -> Future[Cubin]:
    done: Future[Cubin] = Future()
    done.set_result(Cubin(b"code", 0, kernel.num_warps))
    return done


class Clock:
    """Microseconds by the number of warps of a trial's first launch."""

    def __init__(self, by_warps: dict[int, float], otherwise: float = 50.0) -> None:
        self.by_warps, self.otherwise = by_warps, otherwise
        self.trials: list[Trial] = []

    def __call__(self, t: Trial) -> float:
        self.trials.append(t)
        return self.by_warps.get(t["steps"][0]["warps"], self.otherwise)


def tuner(folder: Path, measured: Callable[[Trial], float]) -> TileTuner:
    return TileTuner(GPU, "a GPU", compiled, measured, MeasuredTimes(folder, lock_s=5))


def large(layers: int = 1) -> Scheduled:
    """`layers` equal kernels with a matrix product between them."""

    def fn(x: T, w: T) -> T:
        for _ in range(layers):
            x = norm(x) @ w
        return x

    return scheduled(fn, torch.empty(1024, 512), torch.empty(512, 512))


def warps_of(es: list[Emitted]) -> list[int]:
    return [printed.num_warps for _, printed, _ in es]


def test_the_fastest_is_taken_and_equal_kernels_are_measured_once(tmp_path: Path) -> None:
    s, said = large(3), []
    es = emitted(s)
    (before,) = set(warps_of(es))
    clock = Clock({before * 2: 20.0})
    out = tuner(tmp_path, clock).tuned(s.program, es, lambda *a: said.append(a))
    assert warps_of(out) == [before * 2] * 3
    assert all("20.0 us measured, 50.0 us as the rules choose" in reason for *_, reason in said)
    asked = len(clock.trials)
    assert asked == len({(str(t["steps"][0]["grid"]), t["steps"][0]["warps"]) for t in clock.trials})
    second_clock = Clock({})
    assert warps_of(tuner(tmp_path, second_clock).tuned(s.program, es, lambda *a: None)) == warps_of(out)
    assert second_clock.trials == []


def test_the_rules_stay_where_nothing_is_faster(tmp_path: Path) -> None:
    s = large()
    es = emitted(s)
    assert tuner(tmp_path, Clock({}, 49.0)).tuned(s.program, es, lambda *a: None) == es


def test_small_and_symbolic_kernels_are_not_measured(tmp_path: Path) -> None:
    clock = Clock({}, 1.0)
    s = scheduled(norm, r(8, 64))
    tuner(tmp_path, clock).tuned(s.program, emitted(s), lambda *a: None)
    (gm,) = trace(norm, r(1024, 512), dynamic=True)
    d = schedule(gm, None, GPU)
    tuner(tmp_path, clock).tuned(d.program, emitted(d), lambda *a: None)
    assert clock.trials == []


@pytest.mark.parametrize("problem", [TrialFailed("out of registers"), MeasurerDied("killed")])
def test_what_cannot_be_measured_keeps_the_rules(tmp_path: Path, problem: Exception) -> None:
    def fails(t: Trial) -> float:
        raise problem

    s = large()
    es = emitted(s)
    assert tuner(tmp_path, fails).tuned(s.program, es, lambda *a: None) == es


def test_partial_results_are_buffers_of_the_trial(tmp_path: Path) -> None:
    clock = Clock({})
    s = scheduled(weights, torch.empty(4096, 512))
    es = emitted(s)
    assert any(printed.finish for _, printed, _ in es)
    tuner(tmp_path, clock).tuned(s.program, es, lambda *a: None)
    several = [t for t in clock.trials if len(t["steps"]) > 1]
    assert several
    for t in several:
        assert {b for step in t["steps"] for b in step["buffers"]} <= set(t["buffers"])
    assert RULES == "rules"
    assert all(isinstance(e[0], TiledKernel) for e in es)
