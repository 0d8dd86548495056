"""Cached captured graphs load without AOTAutograd: same bits, same errors; a different graph is a miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import altbackend
from altbackend import backend, entry_point
from altbackend.compat import torch_api
from altbackend.compile_pool import cuda as compile_cuda
from altbackend.config.resolve import resolve
from altbackend.debug.trace import DecisionKind, Trace
from altbackend.disk_cache.remote import remote
from altbackend.disk_cache.storage import Store, open_store
from altbackend.graph_cache import entry_files, key, traced
from altbackend.runtime.aot_wrapper import Alias, Plan
from altbackend.runtime.views import Step

pytestmark = pytest.mark.sample(2)

T = torch.Tensor
ROOT = Path(__file__).parents[2]


@dataclass
class Watch:
    """Verdicts on captured graphs, how often AOTAutograd ran, and a folder of its own."""

    folder: Path
    verdicts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    traced: int = 0

    def compile(self, fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        """As a process that starts does: Dynamo knows nothing."""
        torch._dynamo.reset()
        options = {"strict": True, "cache_graphs": True, "cache_dir": str(self.folder), **more.pop("options", {})}
        return torch.compile(fn, backend="alt", options=options, **more)

    def seen(self) -> list[str]:
        """Since the last call."""
        found, self.verdicts = self.verdicts, []
        return found


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch_, record, slow = Watch(tmp_path / "kept"), Trace.decision, backend.trace_and_compile

    def decision(self: Trace, kind: DecisionKind, subject: str, verdict: str, reason: str) -> None:
        record(self, kind, subject, verdict, reason)
        if kind == "warm start" and verdict != "not looked up":
            watch_.verdicts.append(verdict)
            watch_.reasons.append(reason)

    def counted(*args: Any) -> Any:
        watch_.traced += 1
        return slow(*args)

    monkeypatch.setattr(Trace, "decision", decision)
    monkeypatch.setattr(altbackend, "trace_and_compile", counted, raising=False)
    return watch_


def twice(watch: Watch, run: Callable[[Callable[..., Any]], Any], fn: Callable[..., Any], **more: Any) -> Any:
    """`run` on a freshly compiled `fn` in two processes; the second is a hit. Gives both results."""
    first = run(watch.compile(fn, **more))
    assert watch.seen() == ["miss", "stored"]
    second = run(watch.compile(fn, **more))
    assert watch.seen() == ["hit"]
    assert watch.traced == 1
    return first, second


def same(a: Any, b: Any) -> bool:
    if isinstance(a, T):
        return type(a) is type(b) and a.requires_grad == b.requires_grad and torch.equal(a.detach(), b.detach())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Net(nn.Module):
    """Convolution, batch normalisation with its counters, dropout, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 16, 5)

    def forward(self, x: T) -> T:
        y = torch.relu(self.norm(self.conv(x))).flatten(1)
        return torch.softmax(self.out(nn.functional.dropout(y, 0.3, self.training)), -1)


@pytest.mark.parametrize("gpu", [True, False], ids=["with a GPU", "without"])
def test_a_first_look_up_starts_workers_where_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(torch_api, "gpu_in_use", lambda: gpu)
    monkeypatch.setattr(compile_cuda, "start_workers_early", lambda cfg: started.append(Path(cfg.cache_dir)))
    monkeypatch.setenv("ALTBACKEND_CACHE_DIR", str(tmp_path / "one"))
    entry_point.start_workers_early()
    assert started == [tmp_path / "one"] * gpu
    (tmp_path / "one/graphs").mkdir(parents=True)
    entry_point.start_workers_early()
    monkeypatch.setenv("ALTBACKEND_CACHE_DIR", str(tmp_path / "two"))
    monkeypatch.setenv("ALTBACKEND_WORKER_START", "nonsense")  # said by the call, not here
    entry_point.start_workers_early()
    assert len(started) == gpu


def test_a_store_that_others_share_may_hold_something(tmp_path: Path) -> None:
    assert entry_files.is_empty(Store(tmp_path))
    assert not entry_files.is_empty(Store(tmp_path, shared=remote("redis://127.0.0.1:1/0", b"s" * 16)))
    (tmp_path / "below/graphs").mkdir(parents=True)
    assert not entry_files.is_empty(Store(tmp_path, read_only=(tmp_path / "below",)))


def test_inference(watch: Watch) -> None:
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)

    def run(compiled: Callable[..., Any]) -> T:
        with torch.no_grad():
            return compiled(x)

    first, second = twice(watch, run, net)
    assert same(first, second)
    assert not second.requires_grad


def step(compiled: Callable[..., Any], net: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    x = torch.arange(216.0).reshape(2, 3, 6, 6).sin().requires_grad_()
    y = compiled(x)
    (y * torch.arange(5.0)).sum().backward()
    return [y, x.grad, *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def test_training_with_buffers_and_random_numbers(watch: Watch) -> None:
    """Gradients, statistics that the forward writes and their versions, dropout by torch's generator."""
    versions = []

    def train() -> list[Any]:
        torch.manual_seed(0)
        net = Net()
        before = [b._version for b in net.buffers()]
        out = step(watch.compile(net), net)
        versions.append([b._version - v for b, v in zip(net.buffers(), before, strict=True)])
        return out

    first = train()
    assert watch.seen() == ["miss", "stored"]
    second = train()
    assert watch.seen() == ["hit"]
    assert same(first, second)
    assert versions[0] == versions[1]
    assert versions[1] == [1, 1, 1]


def files_of(call: Callable[[], Any]) -> set[str]:
    """Return the names of the files of the Python functions that a call runs."""
    files: set[str] = set()
    sys.setprofile(lambda frame, *_: files.add(Path(frame.f_code.co_filename).name))
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.parametrize("grad", [False, True])
def test_the_first_process_calls_a_graph_as_a_warm_start_does(watch: Watch, grad: bool) -> None:
    """Once the backward is compiled, calls pass AOTAutograd's wrappers by."""
    layer = nn.Linear(3, 3)
    call = watch.compile(lambda x: torch.relu(layer(x)))
    x = torch.randn(2, 3)

    def step() -> None:
        with torch.set_grad_enabled(grad):
            y = call(x)
            if grad:
                y.sum().backward()

    step()
    step()
    files = files_of(step)
    assert "variants.py" in files
    assert "aot_wrapper.py" in files
    assert not {"runtime_wrappers.py", "aot_autograd.py"} & files


def test_a_graph_that_is_not_stored_is_called_so_too(watch: Watch) -> None:
    """Its conditions are on a float, and one input is the result of another graph, which gets a gradient."""

    def fn(x: T, y: T, by: float) -> T:
        return x.detach() * by + y * (2.0 if by > 0.5 else 3.0)

    x, y = (torch.randn(4, requires_grad=True) for _ in range(2))
    call = watch.compile(fn, dynamic=True)
    for by in (0.75, 0.8, 0.75, 0.25, 0.3):
        chained = x * 2
        got, wanted = call(chained, y, by), fn(chained, y, by)
        assert torch.equal(got, wanted)
        for a, b in zip(
            torch.autograd.grad(got.sum(), [x, y], allow_unused=True, retain_graph=True),
            torch.autograd.grad(wanted.sum(), [x, y], allow_unused=True, retain_graph=True),
            strict=True,
        ):
            assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def test_nothing_is_kept_before_the_backward_has_run(watch: Watch) -> None:
    net = Net()
    watch.compile(net)(torch.randn(2, 3, 6, 6))
    assert watch.seen() == ["miss"]
    step(watch.compile(net), net)
    assert watch.seen() == ["miss", "stored"]


def test_an_input_that_the_graph_writes(watch: Watch) -> None:
    def fn(x: T, y: T) -> T:
        x.mul_(2).add_(y)
        return x.sum() + y

    def run(compiled: Callable[..., Any]) -> list[Any]:
        x, y = torch.ones(5), torch.arange(5.0)
        before = x._version
        return [compiled(x, y), x, x._version > before]

    first, second = twice(watch, run, fn)
    assert same(first, second)
    assert same(second[1], 2 + torch.arange(5.0))
    assert second[2]


def test_a_result_that_is_an_input(watch: Watch) -> None:
    """In training autograd must not see it come back."""

    def fn(x: T, w: T) -> tuple[T, T, int]:
        return x, torch.relu(x @ w), x.shape[0]

    def run(compiled: Callable[..., Any]) -> list[Any]:
        x, w = torch.ones(3, 3), torch.eye(3).requires_grad_()
        back, y, n = compiled(x, w)
        assert back is x
        y.sum().backward()
        return [y, w.grad, n]

    first, second = twice(watch, run, fn)
    assert same(first, second)


def test_results_of_which_some_have_no_gradient(watch: Watch) -> None:
    def fn(x: T) -> tuple[T, T, T]:
        y = x * 2
        return y.argmax(), y.exp(), y.detach() + 1

    def run(compiled: Callable[..., Any]) -> list[Any]:
        x = torch.arange(4.0).requires_grad_()
        top, y, z = compiled(x)
        y.sum().backward()
        return [top, y, z, x.grad]

    first, second = twice(watch, run, fn)
    assert same(first, second)
    assert [t.requires_grad for t in second[:3]] == [False, True, False]


def test_a_gradient_of_another_layout(watch: Watch) -> None:
    def run(compiled: Callable[..., Any]) -> T:
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        compiled(x).backward(torch.arange(12.0).reshape(4, 3).t())
        return x.grad  # type: ignore[return-value]

    first, second = twice(watch, run, lambda x: x.sin() * 3)
    assert same(first, second)


def test_a_chain_of_graphs_and_an_input_without_a_gradient(watch: Watch) -> None:
    """Code before a compiled call gets no gradient from an input that the call's results do not depend on."""

    def run(compiled: Callable[..., Any]) -> list[Any]:
        x, w = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        compiled(x * 2, w * 3).sum().backward()
        return [x.grad, w.grad]

    first, second = twice(watch, run, lambda x, w: x.detach() * w)
    assert same(first, second)
    assert second[0] is None


def test_sizes_that_vary(watch: Watch) -> None:
    """The entry of one size serves another, with what tracing assumed as guards of Dynamo's."""

    def fn(x: T, y: T) -> tuple[T, int]:
        return torch.softmax(x @ y.t(), -1) * 3, x.shape[0] + 1

    def run(compiled: Callable[..., Any], n: int) -> list[Any]:
        x, y = torch.arange(8.0 * n).sin().reshape(n, 8).requires_grad_(), torch.arange(8.0 * n).cos().reshape(n, 8)
        out, number = compiled(x, y)
        out.square().sum().backward()
        eager, _ = fn(x, y)
        (want,) = torch.autograd.grad(eager.square().sum(), x)
        torch.testing.assert_close(out, eager)
        torch.testing.assert_close(x.grad, want)
        assert number == n + 1
        return [out, x.grad]

    first = run(watch.compile(fn, dynamic=True), 7)
    assert watch.seen() == ["miss", "stored"]
    second = watch.compile(fn, dynamic=True)
    assert same(run(second, 7), first)
    for n in (11, 30):
        run(second, n)
    assert watch.seen() == ["hit"]
    assert watch.traced == 1


def test_a_hit_with_another_size_than_the_entry_was_made_with(watch: Watch) -> None:
    def fn(x: T) -> T:
        return (x * 2).flatten()[: x.shape[0]]

    for n, verdicts in ((7, ["miss", "stored"]), (11, ["hit"])):
        x = torch.randn(n, 3)
        assert same(watch.compile(fn, dynamic=True)(x), fn(x))
        assert watch.seen() == verdicts


def test_conditions_that_tracing_met_hold_or_the_graph_is_traced(watch: Watch) -> None:
    def fn(x: T, y: T) -> T:
        return x.reshape(-1)[: y.shape[0]] + y

    def check(compiled: Callable[..., Any], rows: int, n: int) -> None:
        x, y = torch.randn(rows, 4), torch.randn(n)
        torch.testing.assert_close(compiled(x, y), fn(x, y))

    check(watch.compile(fn, dynamic=True), 9, 5)
    watch.seen()
    compiled = watch.compile(fn, dynamic=True)
    check(compiled, 8, 6)
    check(compiled, 2, 8)  # exactly as many as there are
    assert "hit" in watch.verdicts or "miss" in watch.verdicts


def test_graphs_inside_the_graph(watch: Watch) -> None:
    def fn(x: T) -> T:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() + 1, (x,)) * 3

    def run(compiled: Callable[..., Any]) -> list[T]:
        leaves = [torch.full((3,), float(k)).requires_grad_() for k in (1, -1)]
        outs = [compiled(x) for x in leaves]
        return [*outs, *torch.autograd.grad([y.sum() for y in outs], leaves)]

    first, second = twice(watch, run, fn)
    assert same(first, second)
    torch.testing.assert_close(second, run(fn))


def test_numbers_in_the_code(watch: Watch) -> None:
    def fn(x: T) -> T:
        weights = torch.tensor([0.5, 2.0, -1.0])
        return (x * weights).sin() + torch.tensor([True, False, True])

    def run(compiled: Callable[..., T]) -> list[T]:
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        y = compiled(x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    first, second = twice(watch, run, fn)
    assert same(first, second)
    torch.testing.assert_close(second, run(fn))


def views(x: T) -> tuple[T, ...]:
    return x.t(), x[1:].detach(), x * 2 + 1, x.view(-1)[1:5], x


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_results_that_are_views_of_an_input(watch: Watch, grad: bool) -> None:
    def run(fn: Callable[[T], tuple[T, ...]]) -> list[Any]:
        leaf = torch.arange(6.0).reshape(2, 3).requires_grad_(grad)
        x = leaf * 1
        turned, apart, computed, part, same = fn(x)
        assert [y._is_view() for y in (turned, part)] == [True, True]
        assert [y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for y in (turned, apart, part)] == [
            True
        ] * 3
        assert same is x
        part.mul_(3)  # seen by all that share its memory
        out = [turned.clone(), apart.clone(), computed, part.clone(), turned.stride(), apart.requires_grad]
        if grad:
            out += torch.autograd.grad((turned * 2).sum() + computed.sum() + part.square().sum(), leaf)
        return out

    first, second = twice(watch, run, views)
    assert same(first, second)
    assert same(second[4:], run(views)[4:])
    torch.testing.assert_close(second[:4], run(views)[:4])


def test_views_of_inputs_of_varying_sizes(watch: Watch) -> None:
    def run(fn: Callable[[T], tuple[T, T]]) -> list[T]:
        return [y for n in (4, 6) for y in fn(torch.arange(n * 3.0).reshape(n, 3))]

    first, second = twice(watch, run, lambda x: (x.t()[1:], x + 1), dynamic=True)
    assert same(first, second)
    assert same(second, run(lambda x: (x.t()[1:], x + 1)))


def test_ellipses_are_kept(watch: Watch) -> None:
    first, second = twice(watch, lambda f: f(torch.arange(12.0).reshape(2, 6)), lambda x: x[..., ::2] + x[..., 1::2])
    assert same(first, second)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: x.nonzero(), "only data decides"),
        (lambda x: torch.ops.test_traced.own(x), "not an operator of torch's own"),
    ],
)
def test_what_is_not_kept_is_traced_every_time(watch: Watch, fn: Callable[[T], T], why: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        results = [watch.compile(fn)(x) for _ in range(2)]
    assert same(*results)
    assert same(results[0], fn(x))
    assert "hit" not in watch.verdicts
    assert "stored" not in watch.verdicts
    assert any(why in r for r in [*watch.reasons, reason_for(fn, watch)])


def reason_for(fn: Callable[[T], T], watch: Watch) -> str:
    """Return the reason why a captured graph is not looked up."""
    found: list[Any] = []
    torch._dynamo.reset()

    def look(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        cfg = resolve(options={"cache_graphs": True, "cache_dir": str(watch.folder)})
        found.append(traced.query_of(gm, inputs, cfg))
        return gm.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(fn, backend=look)(torch.arange(6.0).reshape(2, 3))
    return str(found[0])


@torch.library.custom_op("test_traced::own", mutates_args=())
def own(x: T) -> T:
    return x + 1


@own.register_fake
def _(x: T) -> T:
    return torch.empty_like(x)


def test_subclasses_are_traced(watch: Watch) -> None:
    x = TwoTensor(torch.ones(3), torch.zeros(3))
    results = [watch.compile(lambda t: t * 2 + 1)(x) for _ in range(2)]
    assert watch.seen() == []
    assert watch.traced == 2
    assert torch.equal(results[1].a, torch.full((3,), 3.0))


def test_views_of_one_tensor_are_traced(watch: Watch) -> None:
    base = torch.arange(8.0)
    for _ in range(2):
        watch.compile(lambda a, b: a + b)(base[:4], base[4:])
    assert watch.seen() == []


@pytest.mark.parametrize("change", ["options", "autocast", "grad", "static", "code"])
def test_what_differs_is_not_found(watch: Watch, change: str) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        watch.compile(net)(x)
    assert watch.seen() == ["miss", "stored"]
    if change == "options":
        with torch.no_grad():
            watch.compile(net, options={"numerics": "eager"})(x)
    elif change == "autocast":
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert watch.compile(net)(x).dtype == torch.bfloat16
    elif change == "grad":
        watch.compile(net)(x).sum().backward()
    elif change == "static":
        with torch.no_grad():
            watch.compile(lambda x: nn.functional.linear(x, net.weight.detach(), net.bias.detach()))(x)
    else:
        with torch.no_grad():
            watch.compile(nn.Sequential(net, nn.ReLU()))(x)
    assert watch.seen() == ["miss", "stored"]
    assert watch.traced == 2


def test_autocast_at_the_call(watch: Watch) -> None:
    """The graph has its casts in it; library calls inside must not be cast again."""
    net, x = nn.Linear(64, 64), torch.randn(4, 64)

    def run(compiled: Callable[..., Any]) -> list[Any]:
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = compiled(x)
        y.float().sum().backward()
        return [y, net.weight.grad.clone()]

    first, second = twice(watch, run, net)
    assert same(first, second)


@pytest.mark.parametrize("damage", ["traced-*/*.graph", "[0-9a-f]*/*.graph", "plan"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(watch: Watch, damage: str) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)

    def run() -> T:
        return watch.compile(net)(x).sum()

    run().backward()
    watch.seen()
    if damage == "plan":
        store = open_store(resolve(None, {"cache_dir": str(watch.folder)}))
        (path,) = (p for p in entry_files.entry_paths(store) if p.family.startswith("traced-"))
        held = entry_files.read(path)
        assert held is not None
        held["plan"]["same"] = ["x"]
        assert entry_files.write(path, held, {}) == ""
    else:
        for file in (watch.folder / "graphs").glob(damage):
            file.write_bytes(file.read_bytes()[:-7])
    run().backward()
    assert watch.seen()[-1] == "stored"
    run().backward()
    assert watch.seen() == ["hit"]


@pytest.mark.parametrize("by", ["context", "setting"])
def test_compiled_autograd_traces_a_backward_whose_graph_is_kept(watch: Watch, by: str) -> None:
    """It needs AOTAutograd's graph of the backward, also where the cache would save that work."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    want = [g.clone() for g in torch.autograd.grad(net(x).sum(), list(net.parameters()))]
    watch.compile(net)(x).sum().backward()
    assert watch.seen() == ["miss", "stored"]
    net.zero_grad()
    options: dict[str, Any] = {"strict": True, "cache_graphs": True, "cache_dir": str(watch.folder)}
    if by == "context":
        compiler, compiled = torch.compile(backend="alt", fullgraph=True, options=options), watch.compile(net)
        with torch._dynamo.compiled_autograd._enable(compiler):
            compiled(x).sum().backward()
    else:
        with torch._dynamo.config.patch(compiled_autograd=True):
            step = watch.compile(lambda x: net(x).sum().backward())
            step(x)
    assert "hit" not in watch.seen()
    torch.testing.assert_close([p.grad for p in net.parameters()], want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_autograd_traces_the_backward_of_a_cached_forward(watch: Watch, dynamic: bool) -> None:
    """The forward is called before compiled autograd is switched on, and its graphs come from the cache."""

    def fn(x: T, w: T) -> T:
        return (x @ w).view(-1, 2, 4).transpose(0, 1).relu().softmax(-1) * x.shape[0]

    def gradients(run: Callable[..., T], fullgraph: bool) -> list[T]:
        x, w = torch.randn(6, 3, requires_grad=True), torch.randn(3, 8, requires_grad=True)
        result = run(x, w).square().sum()
        if fullgraph:
            compiler = torch.compile(backend="alt", fullgraph=True, options={"strict": True})
            with torch._dynamo.compiled_autograd._enable(compiler):
                result.backward()
        else:
            result.backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]

    torch.manual_seed(0)
    want = gradients(fn, False)
    for outcome in ("stored", "hit"):
        torch.manual_seed(0)
        torch.testing.assert_close(gradients(watch.compile(fn, dynamic=dynamic), outcome == "hit"), want)
        assert watch.seen()[-1] == outcome


def test_switched_off(watch: Watch) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    for options in ({"warm_start": False}, {"cache_graphs": False}):
        watch.compile(net, options=options)(x).sum().backward()
    assert watch.seen() == []
    assert not list((watch.folder / "graphs").glob("traced-*"))


def test_a_second_backward_and_a_second_derivative(watch: Watch) -> None:
    """As AOTAutograd has it: a kept graph can be run back through again, second derivatives are refused."""
    fn = torch.sin
    for expected in ("stored", "hit"):
        x = torch.ones(3, requires_grad=True)
        y = watch.compile(lambda t: fn(t) * t)(x)
        y.sum().backward(retain_graph=True)
        once = x.grad.clone()
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * once)
        z = watch.compile(lambda t: fn(t) * t)(x)
        (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            g.sum().backward()
        assert expected in watch.seen()


def test_a_saved_tensor_that_is_written_is_reported(watch: Watch) -> None:
    for _ in range(2):
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        y = watch.compile(lambda x, w: (x * w).exp())(x, w)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_checkpointed_layers(watch: Watch) -> None:
    layer = nn.Linear(8, 8)

    def fn(x: T) -> T:
        return torch.utils.checkpoint.checkpoint(lambda t: torch.relu(layer(t)) * 2, x, use_reentrant=False)

    def run(compiled: Callable[..., Any]) -> list[Any]:
        layer.zero_grad()
        x = torch.arange(16.0).reshape(2, 8).requires_grad_()
        y = compiled(x)
        y.sum().backward()
        return [y, x.grad, layer.weight.grad.clone()]

    first, second = twice(watch, run, fn)
    assert same(first, second)


@pytest.mark.parametrize("eagers", [False, True])
def test_a_checkpointed_dropout(watch: Watch, eagers: bool) -> None:
    def fn(x: T) -> T:
        region = lambda t: nn.functional.dropout(t * 2, 0.5)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)

    def run(compiled: Callable[..., Any]) -> list[Any]:
        x = torch.arange(1.0, 33.0).requires_grad_()
        torch.manual_seed(3)
        y = compiled(x)
        y.sum().backward()
        return [y, x.grad]

    first, second = twice(watch, run, fn, options={"fallback_random": eagers})
    assert same(first, second)
    assert torch.equal(second[0].detach(), second[1] * torch.arange(1.0, 33.0))


def test_a_plan_is_read_as_it_was_written() -> None:
    steps = (
        Step("slice_Tensor", (0, None, sys.maxsize, 1)),
        Step("view_dtype", ("int32",)),
        Step("unbind_int", (0,), 2),
    )
    views = (Alias(0, 1, False, steps), Alias(1, 1, True))
    plan = Plan((-1, 0), ((), (1,)), (2,), (1,), (0,), (), 1, 2, views=views)
    stored = json.loads(json.dumps(asdict(plan)))
    assert traced.read_plan(stored) == plan
    strange = [{"name": "copy_", "args": [], "part": -1}], [{"name": "view_dtype", "args": ["load"], "part": -1}]
    other = [{**stored, "views": [{**stored["views"][0], "steps": s}]} for s in strange]
    for wrong in ({**stored, "written": [-1]}, {**stored, "sizes": "2"}, {}, *other):
        with pytest.raises((ValueError, KeyError)):
            traced.read_plan(wrong)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1)),
    "one by one": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
}


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], start: str, watch: Watch | None) -> list[T]:
    """Parameters after two steps of an optimizer, compiled if there is something that watches."""
    torch.manual_seed(len(start))
    sizes = ((8,), (8,), (3, 3))
    watch_ = [nn.Parameter(torch.ones(n) if start == "equal" else torch.rand(n) + 1) for n in sizes]
    optimizer = make(watch_)
    step = (lambda: optimizer.step()) if watch is None else watch.compile(lambda: optimizer.step())
    for k in range(2):
        for p in watch_:
            p.grad = p.detach() * 0.1 + k
        step()
    return [p.detach() for p in watch_]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_parameters_that_a_graph_holds_count_by_geometry(
    watch: Watch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are equal, or differ, are no part of the key, and nobody reads them to make it."""
    content, seen = key.bytes_of, list[T]()

    def read(held: T) -> bytes:
        seen.append(held)
        return content(held)

    monkeypatch.setattr(key, "bytes_of", read)
    for k, start in enumerate(("equal", "others", "equal", "still others")):
        found = stepped(OPTIMIZERS[name], start, watch)
        torch.testing.assert_close(found, stepped(OPTIMIZERS[name], start, None))
        assert ("hit" in watch.verdicts) == (k > 0)
        assert ("miss" in watch.seen()) == (k == 0)
    assert not [held for held in seen if isinstance(held, nn.Parameter)]


def test_tensors_that_the_code_holds_and_writes(watch: Watch) -> None:
    net = nn.Linear(4, 4)
    buffer = torch.ones(4)

    def fn(x: T) -> T:
        buffer.add_(1)
        return net(x) + buffer

    for _ in range(2):
        buffer.fill_(1)
        assert same(watch.compile(fn)(torch.ones(2, 4)), net(torch.ones(2, 4)) + 2)


PROGRAM = """
import sys, torch, altbackend
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
x = torch.arange(24.0).reshape(3, 8).sin()
y = torch.compile(net, backend=altbackend.alt)(x)
y.sum().backward()
print(sum(p.grad.double().sum().item() for p in net.parameters()).hex(), "altbackend.backend" in sys.modules)
"""


def test_a_second_process_imports_no_compiler(tmp_path: Path) -> None:
    env = {**os.environ, "ALTBACKEND_CACHE_DIR": str(tmp_path), "ALTBACKEND_CACHE_GRAPHS": "1", "PYTHONPATH": str(ROOT)}
    out = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    (first, compiler), (second, without) = (text.split() for text in out)
    assert (compiler, without) == ("True", "False")
    assert first == second
