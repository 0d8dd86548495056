"""Kernels that are alike share a launch, and the order of all other steps stays valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.ir.loops import Extern, reads, writes
from altbackend.report import stats
from altbackend.schedule import horizontal_fusion
from altbackend.schedule.device import H200, Cpu, ScheduleContext
from altbackend.schedule.horizontal_parts import HorizontalKernel
from test import triton_run
from test.compare import as_list
from test.graphs import schedule, trace

T = torch.Tensor
GPU = ScheduleContext(H200)


def r(*sizes: int) -> T:
    return torch.randn(sizes)


def chain(x: T, *ws: T) -> T:
    for w in ws:
        x = x @ w.half()
    return x


def gradients(x: T, g: T, *ws: T) -> list[T]:
    """Casts of results that come one after the other."""
    out = []
    for w in ws:
        out.append((x.t() @ g).float())
        g = g @ w
    return out


def momentum(*ts: T) -> list[T]:
    third = len(ts) // 3
    out = []
    for p, g, m in zip(ts[:third], ts[third : 2 * third], ts[2 * third :], strict=True):
        m.mul_(0.9).add_(g)
        p.sub_(m * 0.1)
        out.append(p * 2)
    return out


def counters(*ns: T) -> list[T]:
    return [n + 1 for n in ns]


def steps_and_weights(*ts: T) -> list[T]:
    """Each weight needs the new value of its counter."""
    half = len(ts) // 2
    counts = [n + 1 for n in ts[:half]]
    return [*counts, *(w * torch.exp(-n) for n, w in zip(counts, ts[half:], strict=True))]


def overwritten(x: T, a: T, b: T) -> list[T]:
    """The second cast must see what was written between."""
    first = x @ a.half()
    b.copy_(a * 2 + b)
    return [first, first @ b.half()]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]], list[int]]] = {
    "casts of weights": (chain, lambda: [r(8, 16).half(), *(r(16, 16) for _ in range(5))], [5]),
    "casts of gradients": (
        gradients,
        lambda: [r(8, 16).half(), r(8, 16).half(), *(r(16, 16).half() for _ in range(4))],
        [4],
    ),
    "sizes that differ": (
        lambda *ws: [w.half() for w in ws],
        lambda: [r(1), r(1000), r(7, 3), r(5000), r(2, 3, 5)],
        [5],
    ),
    "an optimizer": (
        momentum,
        lambda: [r(n) for _ in range(3) for n in (70, 1100, 3)],
        [3],
    ),
    "counters and ranges": (
        steps_and_weights,
        lambda: [*(torch.tensor(float(k)) for k in range(4)), r(70), r(1100), r(3), r(5)],
        [4, 4],
    ),
    "counters": (counters, lambda: [torch.tensor(k) for k in range(7)], [7]),
    "work that differs": (lambda a, b, c: (a.sin(), b.cos(), c.sin()), lambda: [r(9), r(9), r(8)], [2]),
    "an input that changes": (overwritten, lambda: [r(4, 8).half(), r(8, 8), r(8, 8)], []),
    "rows that are no range": (lambda a, b: (a.t() + 1, b[:, 1:] * 2), lambda: [r(4, 5), r(4, 5)], []),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(CASES))
def test_results_and_launches(name: str) -> None:
    fn, make, sizes = CASES[name]
    inputs = make()
    our_inputs, eager_inputs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    seen: list[Any] = []
    got, want = as_list(triton_run.compiled(fn, seen=seen)(*our_inputs)), as_list(fn(*eager_inputs))
    for a, b in zip([*got, *our_inputs], [*want, *eager_inputs], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if b.dtype == torch.float16 else 1e-5, atol=2e-2)
    (gm,) = trace(fn, *make())
    s = schedule(gm, ctx=GPU)
    steps = horizontal_fusion.fuse_horizontally(s.program, s.deps, s.steps, lambda *a: None)
    assert [len(b.parts) for b in steps if isinstance(b, HorizontalKernel)] == sizes
    assert triton_run.compile_errors() == []


def test_every_step_runs_once_and_after_what_it_needs() -> None:
    (gm,) = trace(chain, r(8, 16).half(), *(r(16, 16) for _ in range(5)))
    s = schedule(gm, ctx=GPU)
    written: set[str] = set(s.program.inputs)
    ran = 0
    for step in horizontal_fusion.fuse_horizontally(s.program, s.deps, s.steps, lambda *a: None):
        for part in step.parts if isinstance(step, HorizontalKernel) else (step,):
            nodes = [part] if isinstance(part, Extern) else [s.program.nodes[m] for m in part.members]
            assert {b for n in nodes for b in reads(n)} <= written
            ran += 1
        for part in step.parts if isinstance(step, HorizontalKernel) else (step,):
            nodes = [part] if isinstance(part, Extern) else [s.program.nodes[m] for m in part.members]
            written.update(b for n in nodes for b in writes(n))
    assert ran == len(s.steps)


def test_a_launch_takes_as_many_as_fit() -> None:
    (gm,) = trace(lambda *ws: [w.half() for w in ws], *(r(9) for _ in range(horizontal_fusion.GPU.parts + 7)))
    s = schedule(gm, ctx=GPU)
    steps = horizontal_fusion.fuse_horizontally(s.program, s.deps, s.steps, lambda *a: None)
    launches = [k for k in steps if isinstance(k, HorizontalKernel)]
    assert [len(k.parts) for k in launches] == [horizontal_fusion.GPU.parts, 7]


def test_a_chain_of_alike_kernels_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel needs the one before: no search for others that could run may go through all that follow."""
    full, calls = horizontal_fusion._Order._full, list[int]()

    def counted(order: Any, waiting: Any) -> bool:
        calls.append(len(waiting.numbers))
        return full(order, waiting)

    monkeypatch.setattr(horizontal_fusion._Order, "_full", counted)
    w = r(8, 8)

    def fn(x: T) -> T:
        for _ in range(150):
            x = torch.tanh(x) @ w
        return x

    s = schedule(trace(fn, r(8, 8))[0], ctx=ScheduleContext(Cpu(2)))
    limits = horizontal_fusion.CPU
    assert len(horizontal_fusion.fuse_horizontally(s.program, s.deps, s.steps, lambda *a: None, limits)) == 300
    assert 150 <= len(calls) <= 450


def layers(*xs: T) -> list[T]:
    """Pointwise layers over many tensors, each reading its neighbour's last value, with products between them."""
    ys = list(xs)
    for k in range(3):
        products = [y @ y for y in ys]
        ys = [torch.tanh(p) + ys[(n + k) % len(ys)] for n, p in enumerate(products)]
    return [*ys[:3], *(y * 2 for y in ys)]


@pytest.mark.parametrize("reuse", [True, False])
def test_memory_on_a_cpu(reuse: bool) -> None:
    """Parts of one launch neither overwrite what another part reads nor share storage that is in use."""
    inputs = [r(7, 7) / 7 for _ in range(6)]
    before = stats.snapshot()
    run = torch.compile(layers, backend="alt", options={"strict": True, "verify_ir": True, "reuse_memory": reuse})
    for got, want in zip(run(*inputs), layers(*inputs), strict=True):
        torch.testing.assert_close(got, want)
    assert (stats.snapshot() - before).kernels < 10


def test_a_large_pointwise_kernel_runs_in_parallel() -> None:
    """The counter beside a large loop is a kernel of its own."""

    def step(x: T, count: T) -> None:
        x.mul_(count.exp())
        count.add_(1)

    (gm,) = trace(step, r(1 << 17), r(1))
    s = schedule(gm, ctx=ScheduleContext(Cpu(2)))
    large = [k for k in s.steps if not isinstance(k, Extern) and any(n.points == 1 << 17 for n in k.nodes)]
    assert large
    assert all(k.flat for k in large)
