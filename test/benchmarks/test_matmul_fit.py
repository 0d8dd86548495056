"""The steps of benchmarks.matmul_fit around its measurements; the GPU is a function that knows the times."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from altbackend.autotune import products
from altbackend.autotune.measure import TrialFailed
from altbackend.autotune.measured_times import MeasuredTimes
from altbackend.autotune.trial_data import Trial
from altbackend.codegen.triton.print_triton import TritonKernel
from altbackend.runtime.cuda import Cubin
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.products import cost
from altbackend.schedule.products.cost import TEMPLATES, Rate
from benchmarks import matmul_fit


def compiled(kernel: TritonKernel) -> Future[Cubin]:
    done: Future[Cubin] = Future()
    done.set_result(Cubin(b"code", 0, kernel.num_warps))
    return done


def tuner(tmp_path: Path, library: float, separate: float) -> products.ProductTuner:
    """One kernel takes 50 us, the library call and the separate kernel what is said."""

    def measured(t: Trial) -> float:
        return 50.0 if "operator" not in t["steps"][0] else library if len(t["steps"]) == 1 else library + separate

    return products.ProductTuner(ScheduleContext(H200), "a GPU", compiled, measured, MeasuredTimes(tmp_path))


@pytest.mark.parametrize("rate", [Rate(128, 256, 11.0, 4.6, 0.008), Rate(64, 64, 5.5, 0.7, 0.0031)])
def test_constants_are_found_again(rate: Rate) -> None:
    def us(m: int, n: int, k: int) -> float:
        waves = cost.waves(-(-m // rate.rows) * -(-n // rate.columns), H200.sms)
        return rate.start + waves * (rate.per_wave + rate.per_term * k)

    found = matmul_fit.fit(rate, [(s, us(*s)) for s in matmul_fit.SHAPES])
    assert (found.start, found.per_wave, found.per_term) == pytest.approx(
        (rate.start, rate.per_wave, rate.per_term), rel=0.01
    )


@pytest.mark.parametrize("name", matmul_fit.EPILOGUES)
def test_a_case_is_one_product_with_its_reader(name: str, tmp_path: Path) -> None:
    given = tuner(tmp_path, 70, 20)
    case = matmul_fit.make_case((512, 768, 256), name, given, tuple(TEMPLATES))
    row = matmul_fit.run_case(case, given)
    assert row["us"]["call"] == 70
    assert row["us"][products.LIBRARY] == 90
    assert {row["us"][str(t)] for t in TEMPLATES} == {50}
    (line,) = matmul_fit.verdicts(cost.Model(H200), [case], [row])
    assert line.endswith("1.80 x")
    assert "apart    90.0" in matmul_fit.show(row)


def test_a_case_without_a_separate_time_is_a_failure(tmp_path: Path) -> None:
    def measured(t: Trial) -> float:
        if len(t["steps"]) == 2:
            raise TrialFailed("out of memory")
        return 1.0

    given = products.ProductTuner(ScheduleContext(H200), "a GPU", compiled, measured, MeasuredTimes(tmp_path))
    case = matmul_fit.make_case((512, 768, 256), "relu", given, tuple(TEMPLATES))
    with pytest.raises(TrialFailed):
        matmul_fit.run_case(case, given)


def test_lines_for_the_model(tmp_path: Path) -> None:
    given = tuner(tmp_path, 70, 20)
    cases = [
        matmul_fit.make_case(s, n, given, tuple(TEMPLATES)) for n in ("relu", "gelu") for s in matmul_fit.SHAPES[:5]
    ]
    rows = [matmul_fit.run_case(c, given) for c in cases]
    lines = matmul_fit.fitted(rows)
    assert lines[0].startswith("LIBRARY = Rate(rows=128, columns=256, start=70.0,")
    assert len(lines) == 2 + len(TEMPLATES)
    assert lines[-1] == "EPILOGUE_US = 0.0000"
    assert matmul_fit.fitted(rows[:3]) == ["too few cases to fit constants to"]
