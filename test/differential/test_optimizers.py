"""Compiled steps of `torch.optim`: parameters and states over several steps, few launches, no recompilations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from altbackend.report import stats
from test.compare import difference

T = torch.Tensor
optim = torch.optim
STRICT: dict[str, Any] = {"backend": "alt", "options": {"strict": True, "verify_ir": True}}
SHAPES = [(5, 7), (16,), (1,), (3, 0), (), (33, 31), (129,), (8, 3, 2, 2), (4, 5), (6, 2), (1, 9), (2, 2)]
MATRICES = [(5, 7), (33, 31), (4, 5), (6, 2)]

# the optimizer, and the most kernels of a step over twelve tensors
CASES: dict[str, tuple[Callable[[Any], optim.Optimizer], int]] = {
    "momentum, foreach, maximize": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, foreach=True, maximize=True),
        14,
    ),
    "adam": (lambda p: optim.Adam(p, lr=0.01), 10),
    "adam, foreach, amsgrad": (lambda p: optim.Adam(p, lr=0.01, foreach=True, amsgrad=True, weight_decay=0.1), 14),
    "adamw, tensor rate": (lambda p: optim.AdamW(p, lr=torch.tensor(0.01)), 14),
    "rmsprop": (lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9), 10),
    "radam": (lambda p: optim.RAdam(p, lr=0.01, foreach=True), 20),
    "asgd": (lambda p: optim.ASGD(p, lr=0.01, foreach=True), 24),
}


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]


def run(opt: optim.Optimizer, ps: Sequence[T], step: Callable[[], Any], steps: int = 3) -> list[T]:
    """Return parameters and states after some steps with fixed gradients."""
    for k in range(steps):
        torch.manual_seed(k + 1)
        for p in ps:
            p.grad = torch.randn(p.shape).to(p.dtype)
        step()
    states = [x for p in ps for x in opt.state[p].values() if isinstance(x, T)]
    return [*(p.detach() for p in ps), *states]


def compare(make: Callable[[Any], optim.Optimizer], shapes: Any, dtype: torch.dtype = torch.float32) -> int:
    """Compare a compiled optimizer with eager's; return the number of kernels of a step."""
    torch._dynamo.reset()
    mine, theirs = parameters(shapes, dtype), parameters(shapes, dtype)
    opt, reference = make(mine), make(theirs)
    before = stats.snapshot()
    got = run(opt, mine, torch.compile(opt.step, **STRICT))
    new = stats.snapshot() - before
    want = run(reference, theirs, reference.step)
    rtol, atol = (2e-2, 2e-2) if dtype == torch.bfloat16 else (1e-5, 1e-6)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert new.graphs
    return new.kernels // new.graphs


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_steps(name: str) -> None:
    make, most = CASES[name]
    kernels = compare(make, SHAPES)
    assert kernels <= most, kernels


def test_half_precision() -> None:
    assert compare(lambda p: optim.AdamW(p, lr=0.01, foreach=True), SHAPES, torch.bfloat16) <= 14


def test_other_layouts() -> None:
    """Gradients and parameters whose strides differ are no contiguous range."""
    torch._dynamo.reset()
    results = []
    for through in (lambda f: torch.compile(f, **STRICT), lambda f: f):
        torch.manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(6, 9).t()) for _ in range(6)]
        opt = optim.SGD(ps, lr=0.1, momentum=0.9)
        results.append(run(opt, ps, through(opt.step)))
    assert not [text for a, b in zip(*results, strict=True) if (text := difference(a, b, strides=False))]


def test_muon() -> None:
    compare(lambda p: optim.Muon(p, lr=0.01), MATRICES)


def test_adafactor() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compare(lambda p: optim.Adafactor(p, lr=0.01), MATRICES)


def test_a_scheduler_does_not_recompile() -> None:
    torch._dynamo.reset()
    results = []
    for through in (lambda f: torch.compile(f, **STRICT), lambda f: f):
        ps = parameters(SHAPES)
        opt = optim.AdamW(ps, lr=torch.tensor(0.01), eps=1e-4)
        schedule = optim.lr_scheduler.ExponentialLR(opt, 0.5)
        step = through(opt.step)

        def scheduled(step: Any = step, schedule: Any = schedule) -> None:
            step()
            schedule.step()

        run(opt, ps, scheduled, 2)
        before = stats.snapshot()
        results.append(run(opt, ps, scheduled, 4))
        assert (stats.snapshot() - before).graphs == 0
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_number_of_kernels_does_not_grow_with_the_number_of_tensors() -> None:
    counts = {compare(lambda p: optim.Adam(p, lr=0.01), [(k + 2, 3) for k in range(n)]) for n in (6, 24)}
    assert len(counts) == 1, counts
