"""The benchmarks' own arithmetic, cases and processes. No test asserts a time."""

import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks import __main__ as command
from benchmarks import check, machine, runner
from benchmarks import measure as measuring
from benchmarks.cases import SUITES, Case, choose, find
from benchmarks.chart import draw
from benchmarks.measure import gradient_error, measure, output_error, relative_error, repetitions
from benchmarks.options import backend_options, names
from benchmarks.records import Failure, Measurement, Request, Row, read_answer, read_request, write_json
from benchmarks.rivals.program import largest_error
from benchmarks.runner import CACHE_VARIABLES, cache_folder, environment, run_process, run_row
from benchmarks.subject import TrainingStep
from benchmarks.table import compare, comparison_table, geomean, layout, own_seconds, ratio, results_table
from benchmarks.worker import summary

pytestmark = pytest.mark.timeout(120)

ALL_CASES = list({case.name: case for cases in SUITES.values() for case in cases}.values())


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def measured(seconds: float = 2.0, eager: float = 6.0, compiled: float = 2.0, error: float = 1e-7) -> Measurement:
    return Measurement(seconds, (eager,) * 3, (compiled,) * 3, error, None, graphs=1, graph_breaks=0)


def row(case: str, backend: str, cold: Measurement, warm: Measurement | None = None) -> Row:
    return Row(case, backend, "inference", (cold,), (warm,) if warm else ())


# Figures


def test_geomean() -> None:
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert geomean([]) is None
    with pytest.raises(ValueError, match=r"math domain|positive"):
        geomean([1.0, 0.0])


def test_ratio_needs_both_sides() -> None:
    assert ratio(6.0, 3.0) == 2.0
    assert ratio(None, 3.0) is None
    assert ratio(6.0, 0.0) is None


def test_row_takes_medians_over_processes_and_pairs_the_ratio_within_each() -> None:
    cold = (measured(3.0, 10.0, 5.0), measured(5.0, 40.0, 10.0), measured(4.0, 30.0, 10.0))
    found = Row("a", "alt", "inference", cold)
    assert found.cold_seconds == 4.0
    assert found.warm_seconds is None
    assert found.speedups == (2.0, 4.0, 3.0)
    assert (found.speedup, found.eager_ms, found.compiled_ms) == (3.0, 30.0, 10.0)


def test_own_seconds_subtract_aot_eager_of_the_same_case() -> None:
    rows = [
        row("a", "aot_eager", measured(3.0), measured(1.0)),
        row("a", "inductor", measured(10.0), measured(4.0)),
        row("b", "inductor", measured(10.0)),
    ]
    assert own_seconds(rows[1], rows) == 7.0
    assert own_seconds(rows[1], rows, warm=True) == 3.0
    assert own_seconds(rows[0], rows) is None
    assert own_seconds(rows[2], rows) is None


def test_compare_is_theirs_over_ours() -> None:
    rows = [
        row("a", "aot_eager", measured(1.0)),
        row("a", "inductor", measured(21.0, 6.0, 3.0), measured(8.0, 6.0, 3.0)),
        row("a", "alt", measured(3.0, 6.0, 1.5), measured(2.0, 6.0, 1.5)),
        row("b", "alt", measured()),
    ]
    (found,) = compare(rows, "alt", "inductor")
    assert (found.case, found.run_time, found.cold, found.warm, found.own) == ("a", 2.0, 7.0, 4.0, 10.0)
    table = comparison_table(rows)
    assert table is not None
    assert table.splitlines()[-1].split() == ["geometric", "mean", "2.00", "7.00", "4.00", "10.00"]
    assert comparison_table(rows[:2]) is None


def test_results_table_counts_failures_and_leaves_means_of_incomplete_figures_blank() -> None:
    rows = [
        row("a", "aot_eager", measured(1.0)),
        row("a", "alt", measured(3.0, 8.0, 2.0)),
        row("b", "alt", measured(12.0, 9.0, 1.0)),
        Row("c", "alt", "inference", failure=Failure("cold: SIGSEGV")),
    ]
    lines = results_table(rows).splitlines()
    assert lines[4].split() == ["c", "alt", "FAILED", "cold:", "SIGSEGV"]
    # b has no aot_eager, so the mean of own seconds is blank: cold seconds, then x eager
    assert lines[-1].split() == ["geometric", "mean", "(2", "of", "3)", "alt", "6.0", "6.00"]


def test_layout_pads_columns_and_lets_the_free_text_run() -> None:
    text = layout([("name", "n"), ("a", "10"), ("longer", "1"), ("x",)])
    assert text.splitlines() == ["name     n", "a       10", "longer   1", "x"]


def test_worst_error_is_not_hidden_by_order() -> None:
    nan = float("nan")
    assert replace(measured(), output_error=1e-6, gradient_error=1e-3).worst_error == 1e-3
    assert math.isnan(replace(measured(), output_error=1.0, gradient_error=nan).worst_error)
    worst = Row("a", "alt", "inference", (measured(error=1.0), measured(error=nan))).worst_error
    assert worst is not None
    assert math.isnan(worst)


# Errors against eager


def test_relative_error() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want + torch.tensor([0.0, 0.5]), want) == pytest.approx(0.1)
    assert relative_error(want, want) == 0.0
    assert relative_error(want, torch.zeros(2)) == math.inf
    assert relative_error(want.double(), want) == math.inf
    assert relative_error(want[:1], want) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan, 4.0]), want))


def test_output_error_is_the_worst_and_counts_tensors() -> None:
    want = (torch.ones(4), torch.ones(4))
    assert output_error((torch.ones(4), torch.ones(4) * 1.5), want) == pytest.approx(0.5)
    assert output_error(want[:1], want) == math.inf
    assert math.isnan(output_error((torch.full((4,), math.nan), torch.zeros(4)), want))


def test_gradient_error_is_over_all_gradients_together() -> None:
    want = (torch.tensor([3.0]), torch.tensor([4.0]), None)
    assert gradient_error((torch.tensor([3.0]), torch.tensor([4.5]), None), want) == pytest.approx(0.1)
    assert gradient_error((torch.tensor([3.0]), None, None), want) == math.inf
    assert gradient_error((), ()) is None


def test_repetitions_stay_in_bounds() -> None:
    assert repetitions(0.1, 10.0) == 100
    assert repetitions(100.0, 10.0) == 15
    assert repetitions(0.0, 10.0) == 1000


# The command line


def test_names_and_options() -> None:
    assert names("a, b,,a") == ["a", "b"]
    assert backend_options("x=true,y=1.5,inductor:mode=max-autotune,inductor:n=3") == {
        "alt": {"x": True, "y": 1.5},
        "inductor": {"mode": "max-autotune", "n": 3},
    }


@pytest.mark.parametrize("argv", [["--cases", "nothing"], ["--options", "x"], ["--reps", "0"]])
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert argv[1] in capsys.readouterr().err


def test_a_request_follows_the_device_and_the_case() -> None:
    args = command.parser().parse_args(["--device", "cuda", "--options", "alt:x=1"])
    asked = command.request(find("adam"), "alt", args)
    assert (asked.mode, asked.preset, asked.dtype, asked.options) == ("step", "gpu", "bfloat16", {"x": 1})
    assert command.request(find("adam"), "inductor", args).options == {}


# Cases


def test_names_are_unique_and_found() -> None:
    for cases in SUITES.values():
        assert len({case.name for case in cases}) == len(cases)
    assert choose("micro", ["sum_rows", "norm_chain"]) == (find("norm_chain"), find("sum_rows"))
    with pytest.raises(LookupError):
        find("nothing")


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_tiny_case_runs_and_trains(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [package for package in case.requires if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    module, args, kwargs = case.build("tiny")
    if case.mode == "step":
        before = [parameter.detach().clone() for parameter in module.parameters()]
        module(*args, **kwargs)
        assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        return
    if case.mode == "inference":
        assert all(x.numel() > 0 and not x.isnan().any() for x in pytree.tree_leaves(module(*args, **kwargs)))
        return
    leaves = list(module.parameters())
    leaves += [arg.requires_grad_() for arg in args if case.input_gradients and arg.is_floating_point()]
    loss, *outputs = TrainingStep(module.train(), case.loss)(*args, **kwargs)
    loss.backward()
    assert loss.isfinite()
    assert all(output.isfinite().all() for output in outputs)
    assert any(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


@pytest.mark.parametrize("case", SUITES["tasks"], ids=lambda case: case.name)
def test_a_task_is_eight_times_as_large_on_a_gpu(case: Case) -> None:
    with torch.device("meta"):
        small, large = case.build("cpu")[1], case.build("gpu")[1]
    ratios = {b / a for x, y in zip(small, large, strict=True) for a, b in zip(x.shape, y.shape, strict=True)}
    assert 8 in ratios
    assert ratios <= {1, 8}


# Processes


def test_records_survive_json(tmp_path: Path) -> None:
    asked = Request("a", "alt", options={"x": True})
    write_json(tmp_path / "asked", asked)
    assert read_request(tmp_path / "asked") == asked
    for answer in (measured(), Failure("SIGSEGV", "log")):
        write_json(tmp_path / "answer", answer)
        assert read_answer(tmp_path / "answer") == answer


def test_every_cache_is_in_the_given_folder() -> None:
    with cache_folder() as cache:
        assert not list(cache.iterdir())
        found = environment(cache)
        assert all(Path(found[name]).parent == cache for name in CACHE_VARIABLES)
    assert not cache.exists()


def test_summary_is_the_first_cause() -> None:
    outer = RuntimeError("advice")
    outer.inner_exception = ValueError("first\nlast\n\n")  # type: ignore[attr-defined]
    assert summary(outer) == "ValueError: last"
    assert summary(KeyError()) == "KeyError"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_check_in_this_process(mode: str) -> None:
    found = measure(Request("norm_chain", "eager", mode, "tiny", task="check"))  # type: ignore[arg-type]
    assert (found.graphs, found.graph_breaks, found.worst_error) == (1, 0, 0.0)
    assert (found.gradient_error is None) == (mode == "inference")


def test_check_asks_float64_where_eager_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "CHECK_TOLERANCE", -1.0)
    found = measure(Request("norm_chain", "eager", "training", "tiny", task="check"))
    assert found.exact_errors is not None
    eager, compiled = found.exact_errors
    assert 0 < eager == compiled < 1e-5


def test_a_run_writes_its_files_and_goes_on_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--cases", "norm_chain", "--backends", "no_such_backend,aot_eager", "--preset", "tiny"]
    assert command.main([*argv, "--reps", "2", "--no-warm", "--out", str(tmp_path)]) == 1
    assert "FAILED cold: InvalidBackend" in capsys.readouterr().out
    (written,) = tmp_path.glob("*.json")
    results = json.loads(written.read_text())
    failed, done = results["rows"]
    assert failed["failure"]["summary"].startswith("cold: InvalidBackend")
    assert "Traceback" in failed["failure"]["log"]
    assert [len(process["compiled_ms"]) for process in done["cold"]] == [2]
    assert done["cold"][0]["output_error"] < 1e-5
    assert results["machine"]["torch"] == torch.__version__
    assert (results["summary"]["no_such_backend"]["finished"], results["summary"]["aot_eager"]["finished"]) == (0, 1)


def test_rounds_start_cold_and_warm_shares_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Path] = []
    empty: list[bool] = []

    def answer(request: Request, cache: Path, timeout: float) -> Measurement:
        caches.append(cache)
        empty.append(not list(cache.iterdir()))
        (cache / "artifact").touch()
        return measured(seconds=float(len(caches)))

    monkeypatch.setattr(runner, "run_process", answer)
    found = run_row(Request("sum_full", "alt"), 2, True, 60.0)
    assert empty == [True, False, True, False]
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert not any(cache.exists() for cache in caches)
    assert (found.cold_seconds, found.warm_seconds) == (2.0, 3.0)


def test_a_failed_warm_process_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([measured(), Failure("SIGSEGV")])
    monkeypatch.setattr(runner, "run_process", lambda request, cache, timeout: next(answers))
    found = run_row(Request("sum_full", "alt"), 1, True, 60.0)
    assert (found.failure, found.ok, len(found.cold)) == (Failure("warm: SIGSEGV"), False, 1)


def test_a_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho last words >&2\nkill -SEGV $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert run_process(Request("sum_full", "eager"), tmp_path, 60.0) == Failure("SIGSEGV: last words", "last words\n")


def test_a_slow_process_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert run_process(Request("sum_full", "eager"), tmp_path, 0.2) == Failure("timed out after 0.2 s")


def test_check_passes_only_within_the_tolerance() -> None:
    case = find("norm_chain")
    assert check.line(case, "inference", measured(error=1e-4))[-1] == "ok"
    for error in (1.1e-4, math.inf, math.nan):
        assert check.line(case, "inference", measured(error=error))[-1] == "FAILED"
        beside = replace(measured(error=error), exact_errors=(2e-3, error))
        assert check.line(case, "inference", beside)[-1].startswith("ok" if error == 1.1e-4 else "FAILED")
    worse = replace(measured(error=3e-3), exact_errors=(2e-3, 3e-3))
    assert check.line(case, "inference", worse)[-1].startswith("FAILED")
    assert check.line(case, "inference", Failure("SIGSEGV"))[-1] == "FAILED SIGSEGV"
    assert list(check.runs((case, find("adam")), None)) == [
        (case, "inference"),
        (case, "training"),
        (find("adam"), "step"),
    ]


@pytest.mark.parametrize(
    ("answer", "status", "last"),
    [(measured(), 0, "2 of 2 ok"), (measured(error=1e-3), 1, "0 of 2 ok"), (Failure("SIGSEGV"), 1, "0 of 2 ok")],
)
def test_check_command_reports_and_exits(
    answer: Measurement | Failure,
    status: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "run_process", lambda request, cache, timeout: answer)
    assert check.main(["micro", "--cases", "sum_full"]) == status
    assert last in capsys.readouterr().out


# Machine and chart


def test_cpu_model(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU: fast\n")
    assert machine.cpu_model(info) == "Some CPU: fast"
    assert machine.cpu_model(tmp_path / "absent")


def test_chart(tmp_path: Path) -> None:
    rows = [row("a", "alt", measured()), Row("a", "inductor", "inference", failure=Failure("x"))]
    path = tmp_path / "chart.png"
    line = draw(rows, "title", path)
    if find_spec("matplotlib") is None:
        assert line == "no chart: matplotlib is not installed"
        assert not path.exists()
    else:
        assert line == f"chart: {path}"
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_chart_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw([row("a", "alt", measured())], "title", tmp_path / "x.png") == "no chart: matplotlib is not installed"


def test_a_nan_in_any_result_of_a_drawn_program_is_an_infinite_error() -> None:
    one, bad = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert largest_error([one, bad], [one, one]) == float("inf")
    assert largest_error([one.bfloat16(), one], [one, one]) == 0
