"""Tuning of products: measured, stored and reused times, and failures of measuring."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.autotune import measure, products, trial, worker
from altbackend.autotune import tuner as tuning
from altbackend.autotune.measure import Measurer, MeasurerDied, TrialFailed
from altbackend.autotune.measured_times import MeasuredTimes
from altbackend.autotune.products import LIBRARY, ProductTuner
from altbackend.autotune.trial_data import Trial
from altbackend.codegen.triton.print_triton import TritonKernel
from altbackend.compat import torch_api
from altbackend.compile_pool import cuda as compile_cuda
from altbackend.config.resolve import resolve
from altbackend.errors import CompilerFailed
from altbackend.ir.loops import Extern, Program
from altbackend.runtime.cuda import Cubin
from altbackend.schedule.deps import Deps
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.loop_mapping import Refusal
from altbackend.schedule.products import cost
from altbackend.schedule.products.epilogue import Candidate
from altbackend.schedule.products.matmul import Tiles
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(3)

GPU = ScheduleContext(H200)
SEARCH = cost.SEARCH
FAST = SEARCH[2]
ALWAYS = cost.Model(H200, always=True).choose
Chosen = tuple[Tiles, str] | Refusal


def compiled(kernel: TritonKernel) -> Future[Cubin]:
    done: Future[Cubin] = Future()
    done.set_result(Cubin(b"code", 49152, kernel.num_warps))
    return done


class Clock:
    """A measurer that knows the times: of the library, of every tile by its blocks and pipeline."""

    def __init__(self, library: float, tiles: float, fastest: float | None = None) -> None:
        self.library, self.tiles, self.fastest = library, tiles, fastest
        self.trials: list[Trial] = []

    def __call__(self, t: Trial) -> float:
        self.trials.append(t)
        if len(t["steps"]) == 2:
            return self.library
        # candidates come in the order of the search, the separate kernel first
        return self.fastest if len(self.trials) - 2 == SEARCH.index(FAST) and self.fastest else self.tiles


def choose_with(tuner: ProductTuner, rows: int = 512) -> list[Chosen]:
    """Return the tuner's choices for the products of linear + GELU."""
    out: list[Chosen] = []

    def choose(p: Program, deps: Deps, c: Candidate) -> Chosen:
        out.append(tuner.choose(p, deps, c))
        return out[-1]

    inputs = [torch.empty(s, dtype=torch.bfloat16) for s in ((rows, 768), (3072, 768), (3072,))]
    (gm,) = trace(lambda x, w, b: F.gelu(F.linear(x, w, b)), *inputs)
    schedule(gm, None, GPU, choose)
    return out


def tuner(tmp_path: Path, measured: Callable[[Trial], float], **changes: Any) -> ProductTuner:
    fields: dict[str, Any] = {
        "compiled": compiled,
        "store": MeasuredTimes(tmp_path, lock_s=5),
        "machine": "a GPU",
        **changes,
    }
    return ProductTuner(context=GPU, measured=measured, **fields)


def test_the_fastest_is_taken_and_what_is_measured_is_complete(tmp_path: Path) -> None:
    clock = Clock(100, 90, 50)
    (choice,) = choose_with(tuner(tmp_path, clock))
    assert not isinstance(choice, Refusal)
    assert choice == (FAST, "50.0 us measured, 100.0 us apart")
    assert len(clock.trials) == 1 + len(SEARCH)
    apart, described, fused = clock.trials[:3]
    assert [s.get("operator", "kernel") for s in apart["steps"]] == ["addmm", "kernel"]
    assert [s.get("operator", "kernel") for s in fused["steps"]] == ["kernel"]
    assert sorted(n for _, n in fused["buffers"].values()) == [3072, 512 * 768, 512 * 3072, 768 * 3072]
    assert {d for d, _ in apart["buffers"].values()} == {"bfloat16"}
    assert described["buffers"]["scratch"] == ("uint8", 256 * described["steps"][0]["grid"])
    assert described["steps"][0]["buffers"][-1] == "scratch"
    assert "scratch" not in fused["buffers"]
    json.dumps(clock.trials)


def test_the_library_call_stays_where_it_is_as_fast(tmp_path: Path) -> None:
    (choice,) = choose_with(tuner(tmp_path, Clock(100, 99)))
    assert isinstance(choice, Refusal)
    assert choice.reason.startswith("not faster: 99.0 us measured, 100.0 us apart")


def test_times_are_kept_for_other_processes_and_other_shapes_measured(tmp_path: Path) -> None:
    first, second, third = Clock(100, 90, 50), Clock(1, 1), Clock(100, 90)
    assert choose_with(tuner(tmp_path, first)) == choose_with(tuner(tmp_path, second))
    assert second.trials == []
    choose_with(tuner(tmp_path, third), rows=256)
    choose_with(tuner(tmp_path, third, machine="another GPU"))
    assert len(third.trials) == 2 * (1 + len(SEARCH))
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"microseconds": {"library": 1}}', "changed"])
def test_a_damaged_entry_is_measured_again_and_replaced(tmp_path: Path, damage: str) -> None:
    choose_with(tuner(tmp_path, Clock(100, 90, 50)))
    (entry,) = tmp_path.rglob("*.json")
    content = entry.read_text()
    entry.write_text(content.replace("50", "5000") if damage == "changed" else damage)
    clock = Clock(100, 90, 50)
    (choice,) = choose_with(tuner(tmp_path, clock))
    assert not isinstance(choice, Refusal)
    assert len(clock.trials) == 1 + len(SEARCH)
    assert entry.read_text() == content


def test_a_folder_that_cannot_be_written_costs_only_the_next_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (choice,) = choose_with(tuner(tmp_path / "file" / "folder", Clock(100, 90, 50)))
    assert not isinstance(choice, Refusal)


def test_candidates_that_fail_are_left_out(tmp_path: Path) -> None:
    def failing_compiler(kernel: TritonKernel) -> Future[Cubin]:
        if kernel.num_stages != FAST.stages:
            return compiled(kernel)
        done: Future[Cubin] = Future()
        done.set_exception(CompilerFailed("triton.compile", "out of registers", "kernel.py"))
        return done

    clock = Clock(100, 90)

    def failing_run(t: Trial) -> float:
        if len(t["steps"]) == 1 and t["steps"][0]["warps"] == 8:
            raise TrialFailed("CUDA error 1")
        return clock(t)

    (choice,) = choose_with(tuner(tmp_path, failing_run, compiled=failing_compiler))
    assert not isinstance(choice, Refusal)
    assert choice[0].stages != FAST.stages
    assert choice[0].warps == 4
    left = sum(t.stages != FAST.stages and t.warps == 4 for t in SEARCH)
    assert len(clock.trials) == 1 + left


def test_no_times_at_all_give_the_default_choice(tmp_path: Path) -> None:
    def fails(t: Trial) -> float:
        raise TrialFailed("out of memory")

    (choice,) = choose_with(tuner(tmp_path, fails))
    assert isinstance(choice, Refusal)
    assert choice.reason == "not measured: no candidate could be measured"
    (choice,) = choose_with(tuner(tmp_path, fails, default=ALWAYS))
    assert not isinstance(choice, Refusal)


# --- the measuring process -------------------------------------------------------------------------------------------

ANSWERS = """
import json, os, sys, time
for line in sys.stdin:
    trial = json.load(open(line.strip()))
    kind = trial["kind"]
    if kind == "dies":
        os.kill(os.getpid(), 9)
    if kind == "hangs":
        time.sleep(60)
    if kind == "stops in the middle":
        print('{"micro', end="", flush=True)
        time.sleep(60)
    answer = {"error": "no such thing", "ended": True} if kind == "fails" else {"microseconds": os.getpid()}
    print("nonsense" if kind == "nonsense" else json.dumps(answer), flush=True)
"""


@pytest.fixture
def measurer() -> Iterator[Measurer]:
    measurer_ = Measurer((sys.executable, "-c", ANSWERS), start_s=20, trial_s=1)
    yield measurer_
    measurer_.stop()


def test_one_process_answers_many_questions(measurer: Measurer) -> None:
    assert measurer({"kind": "times"}) == measurer({"kind": "times"}) != os.getpid()


def test_a_failure_of_the_device_ends_the_process_but_not_the_measuring(measurer: Measurer) -> None:
    first = measurer({"kind": "times"})
    with pytest.raises(TrialFailed, match="no such thing"):
        measurer({"kind": "fails"})
    assert measurer({"kind": "times"}) != first


@pytest.mark.parametrize("kind", ["dies", "hangs", "stops in the middle", "nonsense"])
def test_a_process_that_dies_or_hangs_is_said_to_and_replaced(measurer: Measurer, kind: str) -> None:
    measurer({"kind": "times"})
    begin = time.monotonic()
    with pytest.raises(MeasurerDied):
        measurer({"kind": kind})
    assert time.monotonic() - begin < 15
    assert measurer({"kind": "times"})


def test_a_killed_process_gives_the_default_choice_and_one_log_line(
    tmp_path: Path, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(tuning, "_warned", set())
    tuning.logger.addHandler(handler)
    try:
        killed = tuner(tmp_path, lambda t: measurer({"kind": "dies"}), default=ALWAYS)
        (choice,) = choose_with(killed)
        choose_with(killed, rows=256)
    finally:
        tuning.logger.removeHandler(handler)
    assert not isinstance(choice, Refusal)
    assert "predicted" in choice[1]
    assert len(said) == 1
    assert said[0].startswith("max_autotune chooses without measuring: the measuring process failed: it ended")
    assert not list(tmp_path.rglob("*.json"))


def test_a_process_killed_from_outside(measurer: Measurer) -> None:
    os.kill(int(measurer({"kind": "times"})), signal.SIGKILL)
    with pytest.raises(MeasurerDied):
        measurer({"kind": "times"})


def test_the_real_process_ends_with_a_reason_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    real = Measurer(measure.on_device(0).command)
    with pytest.raises(MeasurerDied, match="ended"):
        real({"buffers": {}, "steps": []})


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w: (x @ w).relu(), [(40, 48), (48, 50)]),
        (lambda c, x, w: torch.addmm(c, x.t(), w.t(), beta=0.5, alpha=2).relu(), [(50,), (48, 40), (50, 48)]),
        (lambda x, y: (x @ y[:, :48]).relu(), [(3, 40, 48), (3, 64, 50)]),
    ],
)
def test_the_library_call_that_is_timed_is_the_graphs(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    (gm,) = trace(fn, *(torch.empty(s) for s in shapes))
    s = schedule(gm, None, GPU)
    call = next(x for x in s.steps if isinstance(x, Extern))
    t = trial.of(s.program, [call])
    json.dumps(t)
    buffers = {name: torch.randn(n, dtype=getattr(torch, dtype)) for name, (dtype, n) in t["buffers"].items()}
    worker.library_call(t["steps"][0], buffers)()
    operands = [buffers[v.buffer].as_strided(v.sizes, v.strides, v.offset) for v in call.args]
    got, want = buffers[t["steps"][0]["out"]], call.target(*operands, **dict(call.kwargs))
    assert torch.allclose(got.view_as(want), want, atol=1e-4)


# --- who chooses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "model"),
        ({"matmul_templates": "off"}, None),
        ({"matmul_templates": "on"}, "model"),
        ({"matmul_templates": "off", "max_autotune": True}, None),
        ({"max_autotune": True}, "measures"),
        ({"max_autotune": True, "deterministic": True}, "model"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "cuda_capability", lambda device: 90)
    monkeypatch.setattr(torch_api, "cuda_name", lambda device: "a GPU")
    gpu = ScheduleContext(replace(H200, shared_memory=99 << 10))
    (gm,) = trace(lambda x: x * 2, torch.empty(4))
    p = schedule(gm, None, GPU).program
    b = next(iter(p.buffers.values()))
    on_gpu = Program({"x": type(b)("x", b.dtype, b.sizes, b.strides, torch.device("cuda", 0))}, (), (), ())
    choose = products.chooser(resolve(None, {"cache_dir": str(tmp_path), **options}), gpu, on_gpu)
    measures = isinstance(getattr(choose, "__self__", None), ProductTuner)
    assert kind == (None if choose is None else "measures" if measures else "model")
    if measures:
        tuned = choose.__self__
        assert tuned.gpu.shared_memory == 99 << 10
        assert tuned.store.folder == tmp_path / "autotune"
        assert tuned.machine.startswith(f"a GPU {torch.__version__} {compile_cuda.triton_version()}")


def test_without_measuring_templates_are_for_the_kind_of_gpu_that_was_measured() -> None:
    other = replace(H200, shared_memory=163 << 10, capability=80)
    assert cost.chooser(resolve(), H200) is not None
    assert cost.chooser(resolve(), other) is None
    assert cost.chooser(resolve(None, {"matmul_templates": "on"}), other) is not None


def test_both_modes_measure() -> None:
    assert resolve("max-autotune").max_autotune
    assert resolve("max-autotune-no-cudagraphs").max_autotune
    assert LIBRARY not in map(str, SEARCH)
