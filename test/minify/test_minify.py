"""Repro files: what is written when, that they rebuild the graph, and that the minifier shrinks what fails."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

from altbackend.config.options import Config
from altbackend.debug.trace import Trace
from altbackend.errors import FallbackWarning
from altbackend.lowering.registry import LOWERINGS
from altbackend.minify import shrink
from altbackend.minify.cut import Part, calls, entire, graph_of
from altbackend.minify.judge import same_failure
from altbackend.minify.trial import Verdict, difference, examine
from altbackend.repro import file as repro_file
from altbackend.repro.rebuild import rebuild
from test import fresh

ROOT = Path(__file__).parents[2]


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """About 30 operators, one of each that a fault breaks."""
    h = x @ w
    for _ in range(4):
        h = torch.sin(h) * 2 + torch.relu(h)
    h = torch.tanh(h) + torch.softmax(h, -1) + h.amax(0)
    for _ in range(4):
        h = torch.cos(h) - h.mean(0)
    return h


def few_operators(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """For a fault that ends the process: every trial then takes a new one."""
    h = torch.sin(x @ w)
    return torch.relu(h) - h.amax(0)


def written(folder: Path, f: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **options: Any) -> Path:
    """The repro file of a graph that compiles."""
    settings = {"strict": True, "repro": "always", "debug_dir": str(folder), **options}
    torch.compile(f, backend="alt", options=settings, dynamic=dynamic)(*inputs)
    (found,) = folder.rglob("repro.py")
    return found


def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return fresh.run(words, 200, env=environ, cwd=cwd)


@pytest.mark.parametrize(
    ("fault", "verdict", "operator", "fn", "fewest"),
    [
        ("fault_error", "error: RuntimeError: injected: no softmax", "_softmax", model, 28),
        ("fault_wrong", "wrong: result 0 differs", "tanh", model, 28),
        ("fault_crash", "crash: it ended with status 3", "amax", few_operators, 5),
    ],
)
@pytest.mark.sample(3)
def test_a_graph_shrinks_to_the_call_that_fails(
    tmp_path: Path, fault: str, verdict: str, operator: str, fn: Callable[..., torch.Tensor], fewest: int
) -> None:
    path = written(tmp_path, fn, torch.randn(6, 8), torch.randn(8, 8))
    before = len(calls(rebuild(path).gm, entire(rebuild(path).gm)))
    assert before >= fewest
    done = command("-m", "altbackend", "minify", str(path), "--import", f"test.minify.{fault}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(verdict)
    assert f"1 of {before} nodes remain" in done.stdout
    small = path.with_name("repro_min.py")
    assert small.read_text().count("torch.ops.aten") == 1
    assert f"torch.ops.aten.{operator}" in small.read_text()
    assert examine(path) == Verdict("ok")  # nothing fails without the fault
    assert f"import test.minify.{fault}\n" in small.read_text()


def test_a_smaller_file_fails_by_itself(tmp_path: Path) -> None:
    path = written(tmp_path, model, torch.randn(6, 8), torch.randn(8, 8))
    path.write_text(path.read_text().replace("import torch\n", "import torch\nimport test.minify.fault_error\n", 1))
    done = command("-c", f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert (done.returncode, done.stdout) == (1, "error: RuntimeError: injected: no softmax\n"), done.stderr


def test_a_file_that_does_not_fail_is_said_to(tmp_path: Path) -> None:
    path = written(tmp_path, model, torch.randn(6, 8), torch.randn(8, 8))
    with pytest.raises(shrink.NoFailure, match="ok"):
        shrink.minify(path, (), 60.0, 10)
    assert not path.with_name("repro_min.py").exists()


# --- what is written when ---


def broken(*args: object, **kwargs: object) -> None:
    raise RuntimeError("injected")


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The lowering of softmax raises; the temporary folder is `tmp_path`."""
    monkeypatch.setitem(LOWERINGS, torch.ops.aten._softmax.default, broken)
    monkeypatch.setattr(repro_file, "temporary_folder", lambda: tmp_path)
    return tmp_path


def warning_of(**options: Any) -> str:
    compiled = torch.compile(model, backend="alt", options={"cache_graphs": False, **options})
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(x, w), model(x, w))
    (text,) = [str(c.message) for c in caught if issubclass(c.category, FallbackWarning)]
    return text


def test_the_warning_names_line_operator_folder_and_command(fault: Path) -> None:
    text = warning_of()
    (path,) = (fault / "repro").iterdir()
    for part in ("_softmax", "test_minify.py", "torch.softmax(h, -1)", str(path.parent), f"Reproduce: python {path}"):
        assert part in text
    verdict = examine(path)
    assert (verdict.kind, verdict.name, verdict.message) == ("error", "RuntimeError", "injected")


def test_strict_raises_with_the_command(fault: Path) -> None:
    with pytest.raises(BackendCompilerFailed, match=r"(?s)_softmax.*injected.*Reproduce: python"):
        warning_of(strict=True)
    assert len([*(fault / "repro").iterdir()]) == 1


def test_the_debug_folder_gets_the_file(fault: Path) -> None:
    text = warning_of(debug_dir=str(fault / "debug"))
    (path,) = (fault / "debug").rglob("repro.py")
    assert f"python {path}" in text
    assert not (fault / "repro").exists()


def test_nothing_is_written_under_never(fault: Path) -> None:
    assert "Reproduce" not in warning_of(repro="never")
    assert [*fault.iterdir()] == []


def test_the_temporary_folder_is_bounded(fault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro_file, "MOST_FILES", 2)
    for k in range(4):
        torch._dynamo.reset()
        warning_of(max_fused_nodes=60 + k)  # other options, another file
    assert len([*(fault / "repro").iterdir()]) == 2


def test_what_has_no_text_form_is_a_decision(fault: Path) -> None:
    root, graph = torch.nn.Module(), torch.fx.Graph()
    root.held = object()  # type: ignore[assignment]
    graph.output((graph.get_attr("held"),))
    gm = GraphModule(root, graph)
    trace = Trace("graph0", Config())
    assert repro_file.save(gm, trace, {}, "title") is None
    assert [d.verdict for d in trace.decisions] == ["not written"]
    assert "held" in trace.decisions[0].reason


# --- rebuilding ---


def mutated(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x[i] * torch.full((3, 1), 2.0) + torch.tensor([1.0, float("inf"), 3.0, 4.0])


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "constants and a written input": (mutated, (torch.randn(5, 4), torch.tensor([0, 1, 1]))),
    "sizes": (lambda x: (x.flatten() * x.shape[0], x.sum(-1)), (torch.randn(5, 7),)),
    "several results": (lambda x: [p + 1 for p in x.split([2, 3])] + [x.topk(2)[1]], (torch.randn(5, 7),)),
    "types": (lambda x: (x.to(torch.bfloat16), x > 0, x.to(torch.int32)), (torch.randn(5, 7).half(),)),
    "layouts": (lambda x, y: x + y, (torch.randn(4, 1).expand(4, 6), torch.randn(6, 4).t())),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_file_rebuilds_its_graph(tmp_path: Path, name: str, dynamic: bool) -> None:
    f, inputs = CASES[name]
    path = written(tmp_path, f, *inputs, dynamic=dynamic)
    assert examine(path) == Verdict("ok")
    rebuilt = rebuild(path)
    graph, _ = graph_of(rebuilt.gm, entire(rebuilt.gm), rebuilt.job)
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets == [n.target for n in rebuilt.gm.graph.nodes if n.op == "call_function"]
    values = [n.meta["val"] for n in rebuilt.gm.graph.find_nodes(op="placeholder")]
    assert any(isinstance(v, torch.SymInt) for v in values) == (dynamic and "s" in path.read_text().split("return")[0])


def test_a_backward_can_be_rebuilt(tmp_path: Path) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    options: dict[str, Any] = {"strict": True, "repro": "always", "debug_dir": str(tmp_path)}
    torch.compile(model, backend="alt", options=options)(x, torch.randn(8, 8)).sum().backward()
    paths = sorted(tmp_path.rglob("repro.py"))
    assert [p.parent.name.partition("_")[2] for p in paths] == ["backward", "forward"]
    assert [examine(p) for p in paths] == [Verdict("ok")] * 2


# --- the pieces of the minifier ---


def traced(tmp_path: Path) -> GraphModule:
    return rebuild(written(tmp_path, model, torch.randn(6, 8), torch.randn(8, 8))).gm


def test_given_and_passed_calls_are_not_made(tmp_path: Path) -> None:
    gm = traced(tmp_path)
    everything = entire(gm)
    sines = [n for n in calls(gm, everything) if n.target is torch.ops.aten.sin.default]
    given = everything.with_inputs([sines[0].name])
    assert {n.name for n in calls(gm, everything)} - {n.name for n in calls(gm, given)} == {sines[0].name}
    passed = everything.bypassing(sines[1].name, sines[1].all_input_nodes[0].name)
    made, job = graph_of(gm, passed, {"kind": "inference", "static_inputs": (1,), "user_outputs": 1})
    assert len(made.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == len(sines) - 1
    assert job["static_inputs"] == (1,)
    made.graph.lint()


def test_two_calls_that_fail_together_both_remain(tmp_path: Path) -> None:
    gm = traced(tmp_path)
    targets_needed = {torch.ops.aten.tanh.default, torch.ops.aten.amax.default}

    def fails(part: Part) -> bool:
        return targets_needed <= {n.target for n in calls(gm, part)}

    found = shrink.smallest(gm, entire(gm), fails)
    targets = [n.target for n in calls(gm, found)]
    assert targets_needed <= set(targets)
    assert len(targets) <= 4


def test_chunks_that_are_not_needed_go() -> None:
    assert shrink.without_chunks(range(40), lambda left: {3, 17} <= set(left)) == [3, 17]


def test_failures_are_told_apart() -> None:
    first = Verdict("error", "RuntimeError", "cannot lower add_17 of 3 operands")
    assert same_failure(first, Verdict("error", "RuntimeError", "cannot lower add_2 of 4 operands"))
    assert not same_failure(first, Verdict("error", "ValueError", "cannot lower add_17 of 3 operands"))
    assert not same_failure(first, Verdict("error", "RuntimeError", "no compiler was found on this machine"))
    assert not same_failure(first, Verdict("wrong"))
    assert same_failure(Verdict("crash", "", "status 3"), Verdict("crash", "", "status -11"))


def test_differences_from_eager() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert difference(x, x.clone()) == ""
    assert "differs" in difference(x, torch.tensor([1.1, float("nan"), float("inf")]))
    assert "differs" in difference(x, torch.tensor([1.0, float("nan"), float("-inf")]))
    assert "differs" in difference(x, torch.tensor([1.0, 2.0, float("inf")]))
    z = torch.tensor([1 + 2j, complex("nan")])
    assert difference(z, z.clone()) == ""
    assert "differs" in difference(z, z.conj())
    assert "differs" in difference(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert "torch.float64" in difference(x, x.double())
