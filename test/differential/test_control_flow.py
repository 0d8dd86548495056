"""Bodies of `cond`, `while_loop`, `scan`, `map` and `invoke_subgraph` are compiled, each once, with eager's values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.experimental.control_flow import map as map_rows
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp, pipeline
from altbackend.compat import torch_api
from altbackend.compiled.load import Job, bind
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.graph_cache.key import nodes_of
from altbackend.report import stats
from altbackend.runtime import control_flow
from altbackend.schedule.device import H200
from test import graphs, triton_run
from test.compare import as_list, check, check_gradients, compiled, difference, twin

pytestmark = pytest.mark.sample(3)

T = torch.Tensor


def branches(x: T, w: T) -> T:
    """Data decides between two branches; one has a product, reads a tensor from outside and a size."""
    picked: T = torch.cond(
        x.sum() > 0, lambda y: torch.relu(y @ w.t()) @ w * y.shape[0], lambda y: y.cos() + (w * w).sum(0), (x,)
    )
    return picked * 2


def nested(x: T, w: T) -> T:
    def inner(y: T) -> T:
        out: T = torch.cond(y.mean() > 1, lambda z: z + w[0], lambda z: z.exp(), (y,))
        return out

    out: T = torch.cond(x.sum() > 0, inner, lambda y: y.cos() + 1, (x,))
    return out


def turns(x: T, w: T) -> tuple[T, T]:
    """A number of turns that the data decides."""

    def goes_on(k: T, y: T) -> T:
        return (k < 4) & (y.abs().sum() < 1e4)

    k, y = while_loop(goes_on, lambda k, y: (k + 1, torch.sin(y) * 2 + w[0]), (torch.tensor(0), x))
    return k, y + 1


def recurrence(x: T, w: T) -> tuple[T, T]:
    carried, rows = scan(lambda c, y: (torch.tanh(c * 0.5 + y @ w), c * y), w[0] * 2, x)
    return carried, rows


def every_row(x: T, w: T) -> T:
    out: T = map_rows(lambda y, v: torch.softmax(y, 0) @ v, x, w)
    return out


@torch.compiler.nested_compile_region
def layer(x: T, w: T) -> T:
    return torch.relu(x @ w) + x


def layers(x: T, w: T) -> T:
    for _ in range(4):
        x = layer(x, w) * 0.5
    return x


FUNCTIONS = [branches, nested, turns, recurrence, every_row, layers]


def inputs(rows: int = 6) -> tuple[T, T]:
    return torch.randn(rows, 5), torch.randn(5, 5) * 0.4


def decisions(folder: Path) -> list[str]:
    lines = [line for f in sorted(folder.glob("*/decisions.txt")) for line in f.read_text().splitlines()]
    return [line for line in lines if line.startswith("subgraph: ")]


@pytest.mark.sample(6)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_inference(fn: Callable[..., Any], dynamic: bool, tmp_path: Path) -> None:
    run = compiled(fn, dynamic=dynamic, debug_dir=str(tmp_path))
    for rows in (6, 9) if dynamic else (6, 6):
        x, w = inputs(rows)
        check(fn, x, w, run=run)
        check(fn, -x.abs(), w, run=run)
    found = decisions(tmp_path)
    assert found
    assert all(": compiled" in line for line in found)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_training(fn: Callable[..., Any], dynamic: bool, tmp_path: Path) -> None:
    for x in (inputs()[0], -inputs()[0].abs()):
        torch._dynamo.reset()
        check_gradients(fn, x, inputs()[1], dynamic=dynamic, debug_dir=str(tmp_path))
    found = decisions(tmp_path)
    assert len(found) >= 4  # of the forward and of the backward, twice
    assert all(": compiled" in line for line in found)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_path_of_a_gpu(fn: Callable[..., Any], dynamic: bool) -> None:
    """Kernels of bodies in Triton's interpreter, under the printed host programs, with gradients."""

    def results(f: Callable[..., Any], xs: list[Any]) -> list[T]:
        outs = as_list(f(*xs))
        live = [o for o in outs if o.requires_grad]
        return [*(o.detach() for o in outs), *torch.autograd.grad([o.sin().sum() for o in live], xs)]

    given = [t.requires_grad_() for t in inputs()]
    want = results(fn, twin(given))
    got = results(triton_run.compiled(fn, dynamic=dynamic, host=True), twin(given))
    assert not [text for g, w in zip(got, want, strict=True) if (text := difference(g, w, strides=False))]
    assert not triton_run.compile_errors()


def test_a_scan_of_pairs_leaves_no_call() -> None:
    """In parts, tracing has unrolled it."""
    before = stats.snapshot()
    check(lambda x: associative_scan(lambda a, b: a * b + a, x, 0, combine_mode="generic"), torch.randn(7, 5))
    assert (stats.snapshot() - before).library_calls == 0


# --- each body once ---------------------------------------------------------------------------------------------------


def test_equal_bodies_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers have as many kernels as two, and are translated and built as often."""
    built: list[Any] = []
    translate = pipeline.translate

    def counted(*args: Any) -> Any:
        built.append(args[3].kind)
        return translate(*args)

    monkeypatch.setattr(pipeline, "translate", counted)

    def made(fn: Callable[..., Any]) -> tuple[int, list[Any]]:
        torch._dynamo.reset()
        built.clear()
        before = stats.snapshot()
        check_gradients(fn, *inputs())
        return (stats.snapshot() - before).kernels, built[:]

    two = made(lambda x, w: layer(layer(x, w), w))
    four = made(lambda x, w: layer(layer(layer(layer(x, w), w), w), w))
    assert two[1] == ["forward", "subgraph", "backward", "subgraph"]
    assert four == two


def test_equal_branches_of_two_conditions_are_compiled_once(tmp_path: Path) -> None:
    def fn(x: T) -> T:
        for _ in range(2):
            x = torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() + 1, (x,))
        return x

    check(fn, torch.randn(5, 7), debug_dir=str(tmp_path))
    found = decisions(tmp_path)
    assert len(found) == 2
    assert "const_true_graph_0, const_true_graph_1: compiled" in found[0]


# --- what bodies may do -----------------------------------------------------------------------------------------------


def test_results_that_are_operands_outlive_the_call() -> None:
    """A forward saves what a body gives back; that must not lie in memory that the next call uses again."""

    def fn(x: T, w: T) -> T:
        return layer((x * 2).cumsum(0).sin(), w)

    run = compiled(fn)
    held = []
    for k in range(3):
        x, w = (t.requires_grad_() for t in inputs())
        held.append((x, w, run(x, w)))
        assert k == len(held) - 1
    for x, w, y in held:
        got = torch.autograd.grad(y.sum(), (x, w))
        want = torch.autograd.grad(torch.relu((s := (x * 2).cumsum(0).sin()) @ w).sum() + s.sum(), (x, w))
        assert not [text for g, e in zip(got, want, strict=True) if (text := difference(g, e))]


@pytest.mark.parametrize("step", [1, -1])
def test_integers_carried_from_turn_to_turn(step: int) -> None:
    def fn(x: T) -> tuple[int, T]:
        k, y = while_loop(lambda k, y: k * step < 4, lambda k, y: (k + step, y * k + 1), (0, x))
        return k, y

    check(fn, torch.randn(3, 4))


def test_an_integer_that_may_be_below_zero_is_no_index(tmp_path: Path) -> None:
    def fn(x: T) -> tuple[int, T]:
        k, y = while_loop(lambda k, y: k > -3, lambda k, y: (k - 1, y * (k // 2)), (-1, x))
        return k, y

    check(fn, torch.randn(3, 4), debug_dir=str(tmp_path))
    (reason,) = [line for line in decisions(tmp_path) if "operator by operator" in line]
    assert "may be negative" in reason


def test_a_loop_without_a_turn_gives_copies() -> None:
    def fn(x: T) -> tuple[T, T]:
        y = x * 2
        k, z = while_loop(lambda k, y: k < 0, lambda k, y: (k + 1, y.sin()), (torch.tensor(0), y))
        return k, z + y

    check(fn, torch.randn(3, 4))


@torch.compiler.nested_compile_region
def counted(x: T, count: T) -> T:
    count.add_(1)
    return x.sin() * count


def test_a_body_that_writes_runs_operator_by_operator(tmp_path: Path) -> None:
    def fn(x: T, count: T) -> T:
        return counted(counted(x, count), count)

    check(fn, torch.randn(3, 4), torch.zeros(4), debug_dir=str(tmp_path))
    found = decisions(tmp_path)
    assert found
    assert all("operator by operator" in line for line in found)


def test_a_power_that_a_size_decides() -> None:
    check(lambda x: (x.abs() ** x.shape[0], torch.arange(x.shape[1]) ** x.shape[0]), torch.randn(3, 4), dynamic=True)


def test_writes_to_what_a_body_has_made() -> None:
    def branch(y: T) -> T:
        z = y.clone()
        z[0] += 1
        return z.sin_()

    check(lambda x: torch.cond(x.sum() > 0, branch, lambda y: y.cos(), (x,)), torch.randn(3, 4).abs())


def test_an_error_in_a_body_names_its_line() -> None:
    def fn(x: T, at: T) -> T:
        out: T = torch.cond(x.sum() > 0, lambda y: y[at], lambda y: y[at] * 2, (x,))
        return out

    with pytest.raises(IndexError, match="test_control_flow"):
        compiled(fn)(torch.randn(3, 4).abs(), torch.tensor([0, 9]))


def test_a_body_that_fails_to_compile_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    translate = pipeline.translate

    def failing(*a: Any) -> Any:
        if a[3].kind == "subgraph":
            raise RuntimeError("a defect")
        return translate(*a)

    monkeypatch.setattr(pipeline, "translate", failing)
    x, w = inputs()
    with pytest.warns(UserWarning, match="operator by operator: a defect"):
        check(branches, x, w, strict=False)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a defect"):
        check(branches, x, w)


def test_operands_in_other_strides_than_were_traced() -> None:
    """A loop-carried tensor may come back in another layout than it began with."""
    cfg = resolve(options={"strict": True})
    with FakeTensorMode():
        gm = make_fx(lambda x: (x.exp() + 1,), decomposition_table=decomp.table())(torch.empty(3, 4))
    trace = Trace("body", cfg)
    call = bind(pipeline.translate(gm, cfg, trace, Job("subgraph")), cfg, trace, Job("subgraph"))
    x = torch.randn(4, 3).t()
    torch.testing.assert_close(call([x])[0], x.exp() + 1)


# --- the functions of the host program -------------------------------------------------------------------------------


def test_no_rows_are_an_error_of_words() -> None:
    with pytest.raises(ValueError, match="dimension of size 0"):
        control_flow.map_rows(lambda row: row, [torch.empty(0, 3)])


@pytest.mark.parametrize(
    ("fn", "why"),
    [(branches, "data decides what cond does"), (layers, ""), (every_row, "")],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_replay_from_cuda_graphs(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], why: str) -> None:
    """Data decides which branch runs, so a recording of one is none of the call; a fixed row of kernels is."""
    for name, value in (("cuda_name", "a GPU"), ("cuda_properties", asdict(H200))):
        monkeypatch.setattr(torch_api, name, lambda device, value=value: value)
    cfg = resolve(options={"strict": True, "cudagraphs": True})
    with torch.no_grad():
        (graph,) = graphs.trace(fn, *inputs())
    for n in nodes_of(graph):
        n.meta["val"] = torch.utils._pytree.tree_map(_on_a_gpu, n.meta.get("val"))
    code = pipeline.translate(graph, cfg, Trace("graph", cfg), Job("inference"))
    assert code.subgraphs
    assert all(body.code.jobs for body in code.subgraphs)
    assert code.recording is not None
    assert code.recording.refusal == why


def _on_a_gpu(x: Any) -> Any:
    if not isinstance(x, FakeTensor):
        return x
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
