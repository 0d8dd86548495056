"""Backwards that take over the memory of saved tensors, and those that must not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F

from altbackend.codegen.host import cuda_program, launch_plan
from altbackend.codegen.triton import print_triton
from altbackend.config.resolve import resolve
from altbackend.ir import expr as ex
from altbackend.ir.loops import Extern, writes
from altbackend.lowering.graph import lower_graph
from altbackend.runtime import cpp_host, donated, memory
from altbackend.schedule.donated import with_donated
from altbackend.schedule.tiling.gpu.tiled import pairs_in_one_pass, tile_steps
from test import cpp_cuda_host, cuda_host, graphs, triton_run
from test.torch_versions import no_check_of_custom_operators

pytestmark = pytest.mark.sample(3)

T = torch.Tensor


def mlp() -> torch.nn.Module:
    def layer() -> list[torch.nn.Module]:
        return [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)]

    return torch.nn.Sequential(*layer(), *layer())


def convolutions() -> torch.nn.Module:
    def layer(channels: int) -> list[torch.nn.Module]:
        return [torch.nn.Conv2d(channels, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU()]

    return torch.nn.Sequential(*layer(3), *layer(8), torch.nn.Conv2d(8, 4, 1))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (128, 64)),
    "convolutions": (convolutions, (2, 3, 32, 32)),
}


def gradients(model: torch.nn.Module, call: Callable[[T], T], x: T, keep: bool) -> list[T]:
    """The gradients of the last backward; with `keep` there is one before it, which keeps the graph."""
    inputs = [x, *model.parameters()]
    loss = call(x).square().sum()
    if keep:
        torch.autograd.grad(loss, inputs, retain_graph=True)
    return list(torch.autograd.grad(loss, inputs))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers of `owned`, call by call, to host programs that are loaded from now on."""
    found: list[bool] = []

    def owned(args: Any, indices: Any, real: Any = donated.owned) -> bool:
        found.append(real(args, indices))
        return found[-1]

    monkeypatch.setattr(donated, "owned", owned)
    monkeypatch.setattr(cpp_host, "owned", owned)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("host", ["python", "cpp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_kept_graph_gives_the_same_gradients_again(name: str, host: str, answers: list[bool]) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape, requires_grad=True)
    compiled = torch.compile(model, backend="alt", options={"strict": True, "host": host})
    expected = gradients(model, model, x, keep=False)
    for keep in (False, True, False):
        torch.testing.assert_close(gradients(model, compiled, x, keep), expected, atol=1e-3, rtol=1e-3)
    assert answers == [True, False, True, True]


def test_a_tensor_that_a_hook_holds_is_not_written(answers: list[bool]) -> None:
    held: list[T] = []
    model, x = mlp(), torch.randn(128, 64, requires_grad=True)
    compiled = torch.compile(model, backend="alt", options={"strict": True})
    compiled(x).sum().backward()

    def unpack(t: T) -> T:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        loss = compiled(x).sum()
    loss.backward()
    assert held
    assert answers[0]
    assert not any(answers[1:])


def test_torchs_setting_turns_it_off(answers: list[bool]) -> None:
    model, x = mlp(), torch.randn(128, 64, requires_grad=True)
    with torch._functorch.config.patch(donated_buffer=False):
        torch.compile(model, backend="alt", options={"strict": True})(x).sum().backward()
    assert not answers


def mark_inputs(monkeypatch: pytest.MonkeyPatch, inputs: Sequence[int]) -> None:
    """Let graphs that are scheduled from now on have these inputs donated."""

    def lower(*args: Any) -> Any:
        program, constants = lower_graph(*args)
        return with_donated(program, inputs), constants

    monkeypatch.setattr(graphs, "lower_graph", lower)


# --- the planner's figure --------------------------------------------------------------------------------------------


def allocated(plan: launch_plan.LaunchPlan, takes: bool) -> int:
    """Bytes of a call's arena and of the tensors that it allocates. `takes`: it owns its donated inputs."""
    p, locations = plan.program, plan.locations
    sizes = {b: int(ex.mul(buffer.extent, buffer.dtype.itemsize)) for b, buffer in p.buffers.items()}  # type: ignore[arg-type]
    blocks = [(sizes[b], *span) for b, span in locations.arena.items() if b not in locations.shares]
    own = sum(sizes[b] for b in locations.fresh if not (takes and b in locations.takes))
    return memory.plan(blocks)[1] + own


def plan_of_backward(monkeypatch: pytest.MonkeyPatch, folder: Path, marks: bool) -> launch_plan.LaunchPlan:
    plans: list[launch_plan.LaunchPlan] = []

    def plan(*args: Any) -> launch_plan.LaunchPlan:
        plans.append(original(*args))
        return plans[-1]

    original = launch_plan.plan
    monkeypatch.setattr(launch_plan, "plan", plan)
    torch._dynamo.reset()
    options: dict[str, Any] = {"cache_dir": str(folder), "host": "python", "channels_last": False}
    compiled = torch.compile(convolutions(), backend="alt", options=options)
    with torch._functorch.config.patch(donated_buffer=marks):
        compiled(torch.randn(2, 3, 32, 32, requires_grad=True)).sum().backward()
    return plans[-1]


def test_a_backward_on_a_cpu_allocates_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without = allocated(plan_of_backward(monkeypatch, tmp_path / "without", marks=False), takes=False)
    plan = plan_of_backward(monkeypatch, tmp_path / "with", marks=True)
    assert allocated(plan, takes=True) <= 0.75 * without
    written = {b for s in plan.steps if isinstance(s, launch_plan.Launch) for q, b in s.operands() if q.written}
    assert written & plan.locations.takes.keys()


def peak(s: graphs.Scheduled, takes: bool) -> int:
    """The most bytes of saved tensors and of a backward's own tensors that are alive at once on a GPU."""
    p, steps = s.program, list[cuda_program.Step]()
    for step, tiled in tile_steps(p, s.deps, s.steps, triton_run.TARGET, lambda *_: None):
        if isinstance(step, Extern):
            steps.append(step)
            continue
        assert isinstance(tiled, list)
        for k in tiled:
            p, more = cuda_program.launches(p, *print_triton.emit(p, k), (), len(steps), pairs_in_one_pass(k))
            steps += more
    plan = cuda_program.plan_of(p, steps)
    shares = plan.locations.takes if takes else {}
    sizes = {b: int(ex.mul(buffer.extent, buffer.dtype.itemsize)) for b, buffer in p.buffers.items()}  # type: ignore[arg-type]
    drops, alive, most = cuda_program.last_uses(p, steps), set(p.inputs), 0
    for n, launched in enumerate(steps):
        alive.update(launched.all_buffers if isinstance(launched, cuda_program.CudaLaunch) else writes(launched))
        most = max(most, sum(sizes[b] for b in alive if b not in shares or shares[b] not in alive))
        alive -= set(drops.get(n, ()))
    return most


class Gated(torch.nn.Module):
    """A feed-forward layer with a gate and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = torch.nn.RMSNorm(64), torch.nn.Linear(256, 64)
        self.gate, self.up = (torch.nn.Linear(64, 256, bias=False) for _ in range(2))

    def forward(self, x: T) -> T:
        h = self.norm(x)
        return x + (self.down(F.silu(self.gate(h)) * self.up(h)))


def test_a_backward_on_a_gpu_has_a_lower_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Gated(), torch.randn(128, 64, requires_grad=True)
    _, backward = graphs.trace(lambda x: model(x), x)
    inputs = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    mark_inputs(monkeypatch, [k for k, name in enumerate(inputs) if not name.startswith(("primals", "tangents"))])
    s = graphs.schedule(backward, resolve(), triton_run.TARGET)
    activation = 4 * 128 * 256  # bytes of one activation of the wide layer
    assert peak(s, takes=True) <= peak(s, takes=False) - activation


# --- kernels of a GPU ------------------------------------------------------------------------------------------------


def f(gradient: T, saved: T) -> tuple[T, T]:
    y = torch.ops.aten.gelu_backward(gradient, saved)
    return y, F.silu(y @ y.t()).sum(0)


@pytest.mark.parametrize("host", ["python", "cpp"])
def test_contributions_to_a_gradient_are_summed_in_place(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum takes over the memory of a product that nothing else reads; one that is read again keeps its own."""

    def sums(x: T, w: T, dy: T) -> tuple[T, T, T]:
        once, again = x @ w, dy @ w
        total = once + again.sin()
        return total @ w, again @ w, total.exp() + 1

    texts = list[str]()

    def build(s: Any, steps: Any, launch: Any, real: Any = cuda_host.build) -> Any:
        text, call = (cpp_cuda_host.build if host == "cpp" else real)(s, steps, launch)
        texts.append(text)
        return text, call

    monkeypatch.setattr(cuda_host, "build", build)
    inputs = torch.randn(64, 128), torch.randn(128, 128) / 10, torch.randn(64, 128)
    with no_check_of_custom_operators():
        actual = triton_run.compiled(sums, host=True, capabilities=())(*inputs)
    torch.testing.assert_close(actual, sums(*inputs), atol=1e-3, rtol=1e-3)
    (text,) = texts
    assert re.search(r"^ *(t_)?buf\w* = (view\((t_)?)?buf\w*", text, re.MULTILINE)
    assert "own = owned" not in text


@pytest.mark.parametrize("host", ["python", "cpp"])
def test_a_gpu_kernel_writes_into_an_owned_input(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of `y` is the last to read `saved`; each of its programs reads and writes the same elements once."""
    texts = list[str]()
    if host == "python":  # the fake GPU holds every tensor
        said = iter([False, False, True])
        monkeypatch.setattr(donated, "owned", lambda args, indices: next(said))
    mark_inputs(monkeypatch, [1])

    def build(s: Any, steps: Any, launch: Any, real: Any = cuda_host.build) -> Any:
        text, call = (cpp_cuda_host.build if host == "cpp" else real)(s, steps, launch)
        texts.append(text)
        return text, call

    monkeypatch.setattr(cuda_host, "build", build)
    calls: list[Any] = []
    monkeypatch.setattr(cuda_host, "build", partial(_keeping, build, calls))
    with no_check_of_custom_operators():  # its dispatch mode would keep C++ from running
        triton_run.compiled(f, host=True, capabilities=())(torch.randn(64, 128), torch.randn(64, 128))
    (call,) = calls
    saved, gradient = torch.randn(64, 128), torch.randn(64, 128)
    expected, address = f(gradient, saved), saved.data_ptr()
    args = [gradient, saved]
    kept = call(list(args))
    torch.testing.assert_close(list(kept), list(expected), atol=1e-3, rtol=1e-3)
    assert kept[0].data_ptr() != address
    del saved
    args[:], given = [], args[:]
    own = call(given)
    torch.testing.assert_close(list(own), list(expected), atol=1e-3, rtol=1e-3)
    assert own[0].data_ptr() == address
    (text,) = texts
    assert "donated ?" in text if host == "cpp" else "if own else empty_cuda" in text


def _keeping(build: Any, calls: list[Any], *args: Any) -> Any:
    text, call = build(*args)
    calls.append(call)
    return text, call
