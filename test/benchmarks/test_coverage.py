"""The operator sweep: which samples, what counts as equal, and that no finding is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import coverage, opinfo
from benchmarks.opinfo import Case, Finding

ADD = Case("add", "float32", "forward")


def sample(*sizes: tuple[int, ...]) -> Any:
    first, *rest = (torch.ones(s) for s in sizes)
    held = SimpleNamespace(input=first, args=tuple(rest), kwargs={})
    held.noncontiguous = lambda: SimpleNamespace(input=first.repeat(2, 1).t(), args=tuple(rest), kwargs={})
    return held


def test_few_samples_are_a_middle_one_broadcasting_and_one_with_gaps() -> None:
    every = [sample((0,)), sample((2,)), sample((3,)), sample((4,)), sample((2, 3), (3,)), sample((90,)), sample((5,))]
    middle, broadcast, gaps = opinfo.chosen(every, 3)
    assert middle[0].shape == (5,)
    assert [t.shape for t in opinfo.tensors(broadcast)] == [(2, 3), (3,)]
    assert not gaps[0].is_contiguous()


def test_low_precision_is_judged_by_the_float64_result() -> None:
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * 1.001
    eager = exact.bfloat16()
    near, far = eager + torch.tensor([0.0, 0.0, 0.015]).bfloat16(), eager + torch.tensor([0.0, 0.0, 0.2]).bfloat16()
    assert opinfo.compare([near], [eager], lambda: [exact]) == ""
    assert "eager's is" in opinfo.compare([far], [eager], lambda: [exact])
    assert "infinity" in opinfo.compare([eager / 0], [eager], lambda: [exact])
    assert opinfo.compare([eager], [eager / 0], lambda: [exact]) == ""  # eager overflows, this does not
    assert "infinity" in opinfo.compare([eager], [eager / 0], lambda: [exact / 0])
    assert opinfo.compare([eager / 0], [eager * float("nan")], lambda: [exact * 1e60]) == ""  # it does overflow


def test_the_float64_result_is_that_of_wide_samples_and_wide_dtypes() -> None:
    x, (grad, dim, dtype), kwargs = opinfo.widened(
        (torch.ones(2, dtype=torch.float16), (torch.ones(2).bfloat16(), 0, torch.bfloat16), {"dtype": torch.int64})
    )
    assert (x.dtype, grad.dtype, dim, dtype) == (torch.float64, torch.float64, 0, torch.float64)
    assert kwargs == {"dtype": torch.int64}


def test_an_error_that_eager_has_nearby_is_no_error() -> None:
    """A layer norm over two elements: its gradient is 1e-5 of the terms that cancel in it."""
    case = Case("nn.functional.layer_norm", "float32", "backward")
    x, w = torch.tensor([[1.793, 3.2695]], requires_grad=True), torch.tensor([-1.8369, -2.6445])
    sample: Any = (x, ((2,), w), {})
    subject = opinfo.Subject(case, torch.nn.functional.layer_norm, [sample])
    usual = opinfo.usual_error(subject, sample, 0)
    (exact,) = subject.eager([opinfo.widened(sample)])[0]
    assert 1e-8 < usual < 0.3 * float(exact.abs().max())
    lucky = exact.float()
    for error, accepted in ((1.5 * usual, True), (10 * usual, False)):
        text = opinfo.compare([(exact + error).float()], [lucky], lambda: [exact], lambda k: usual)
        assert (text == "") == accepted


def test_no_sample_divides_an_integer_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    op = opinfo.database()["__rmod__"][0]
    monkeypatch.setattr(op, "dtypes", {*op.dtypes, torch.int64})  # as on a GPU
    made = opinfo._subject(Case("__rmod__", "int64", "forward"), opinfo.Settings("cpu"))
    assert made.samples
    assert all((s[0] != 0).all() for s in made.samples)


def test_random_results_are_compared_by_their_means() -> None:
    a, b = torch.rand(4096), torch.rand(4096)
    assert opinfo.alike([a], [b]) == ""
    assert "mean" in opinfo.alike([a], [b + 0.5])
    assert "instead of" in opinfo.alike([a.double()], [b])


def test_a_compiled_operator_is_generated_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = opinfo.Settings(samples=2)
    assert opinfo.check(ADD, settings).status == "generated"

    def off(fn: Any, way: str, *rest: Any) -> Any:
        return lambda samples: [x + 1 for x in opinfo.run_all(fn, samples)]

    monkeypatch.setattr(opinfo, "compiled", off)
    assert opinfo.check(ADD, settings).status == "aot_eager too"
    monkeypatch.setattr(opinfo, "compiled", lambda fn, way, *rest: off(fn, way) if way == "cpu" else identity(fn))
    assert opinfo.check(ADD, settings).status == "wrong"


def identity(fn: Any) -> Any:
    return lambda samples: opinfo.run_all(fn, samples)


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    case, only_aot = json.loads(line)
    if case["op"] == "dies":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(0 if only_aot else 3)
    if case["op"] == "late":
        time.sleep(60)
    status = "wrong" if case["op"] == "known" else "generated"
    answer = {"status": status, "samples": 1, "library": [], "detail": "", "broken": case["op"] == "breaks"}
    print("answer " + json.dumps(answer), flush=True)
"""


def swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ops: str, *more: str) -> dict[str, Finding]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda c, **kw: start([sys.executable, str(script)], **kw))
    args = coverage.parser().parse_args(["--jobs", "2", *more])
    units = [(Case(name, "float32", "forward"),) for name in ops.split()]
    return {f.case.op: f for f in coverage.sweep(args, units)}


def test_a_worker_that_dies_or_is_late_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = swept(monkeypatch, tmp_path, "one dies two late three breaks four five", "--timeout", "3")
    assert [found[n].status for n in ("one", "two", "three", "breaks", "four", "five")] == ["generated"] * 6
    # aot_eager ends the same ways
    assert found["dies"].status == found["late"].status == "aot_eager too"
    assert "exit status 3 the last words" in found["dies"].detail


def test_the_budget_ends_the_sweep_and_says_what_was_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = swept(monkeypatch, tmp_path, "late late2 one two", "--budget", "5.5")
    assert found["one"].status in ("generated", "not run")
    assert found["late"].status == "not run"


def test_known_failures_excuse_and_passing_ones_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "known.txt"
    table.write_text("# a comment\nadd float32 forward  # reason\nsum float32 forward\n")
    known = coverage.known_failures(table)
    assert known == {ADD, Case("sum", "float32", "forward")}
    assert (
        coverage.summary([Finding(ADD, "wrong"), Finding(Case("sum", "float32", "forward"), "library")], known, 1) == 0
    )
    assert "remove it" in capsys.readouterr().out
    assert coverage.summary([Finding(Case("mul", "float32", "forward"), "crash")], known, 1) == 1


def test_resume_leaves_out_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    out.write_text(json.dumps({"case": {"op": "add", "dtype": "float32", "direction": "forward"}, "status": "wrong"}))
    args = coverage.parser().parse_args(["--ops", "add"])
    assert coverage.plan(args, coverage.held(out)) == [(Case("add", "float32", "backward"),)]
