"""Triton kernels compile while the rest of their graph is printed; long chains can be printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from altbackend import pipeline
from altbackend.codegen.triton import print_triton
from altbackend.compat import torch_api
from altbackend.compile_pool import cuda
from altbackend.compiled.artifact import Code
from altbackend.compiled.load import Job
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.lowering.graph import lower_graph
from altbackend.schedule.device import H200
from test.graphs import trace

pytest.importorskip("triton")

T = torch.Tensor
GPU = torch.device("cuda", 0)


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Code]:
    """Code for a GPU of a function, without one; `submit` as `pipeline.translate` takes it."""
    lower = lower_graph

    def on_gpu(*args: Any) -> Any:
        p, constants = lower(*args)
        return replace(p, buffers={n: replace(b, device=GPU) for n, b in p.buffers.items()}), constants

    monkeypatch.setattr(pipeline, "lower_graph", on_gpu)
    monkeypatch.setattr(pipeline, "device_of", lambda _: GPU)
    monkeypatch.setattr(torch_api, "cuda_properties", lambda _: asdict(H200))

    def translate(fn: Callable[..., Any], *inputs: T, submit: Any = None, **options: Any) -> Code:
        (gm,) = trace(fn, *inputs)
        cfg = resolve(None, {"strict": True, "cache_graphs": False, **options})
        return pipeline.translate(gm, cfg, Trace("early", cfg), Job("inference"), submit)

    return translate


def layers(x: T, w: T) -> T:
    for _ in range(3):
        x = torch.softmax(x @ w, -1) + x
        x = torch.nn.functional.gelu(x).sum(0, keepdim=True) * x
    return x


def written(x: T, w: T) -> tuple[T, T]:
    x.mul_(2)
    y = (x @ w).view(-1)[1:].relu()
    return y, x.t().softmax(0)


def columns(x: T, w: T) -> tuple[T, T]:
    return (x * 2).sum(0), torch.cumsum(w, 0) + 1


@pytest.mark.parametrize("fn", [layers, written, columns])
def test_submitted_jobs_are_the_jobs_of_the_code(
    translated: Callable[..., Code], monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any]
) -> None:
    events: list[Any] = []
    emit = print_triton.emit

    def noted(*args: Any) -> Any:
        events.append("printed")
        return emit(*args)

    monkeypatch.setattr(print_triton, "emit", noted)
    code = translated(fn, torch.randn(512, 64), torch.randn(64, 64), submit=events.append)
    jobs_submitted = [e for e in events if isinstance(e, cuda.Job)]
    assert jobs_submitted == list(code.jobs)
    if fn is layers:
        last_printed = len(events) - events[::-1].index("printed")
        assert any(isinstance(e, cuda.Job) for e in events[:last_printed])


def test_jobs_of_exact_kernels_are_submitted(translated: Callable[..., Code]) -> None:
    jobs_submitted: list[Any] = []
    code = translated(
        columns, torch.randn(512, 64), torch.randn(64, 64), submit=jobs_submitted.append, numerics="eager"
    )
    assert jobs_submitted == list(code.jobs)
    assert not any(j.contract for j in jobs_submitted)


def test_nothing_is_built_where_nobody_asked(translated: Callable[..., Code], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "submit", lambda *_: pytest.fail("a build was started"))
    assert translated(layers, torch.randn(512, 64), torch.randn(64, 64)).jobs


# --- long chains -----------------------------------------------------------------------------------------------------


def chain(count: int) -> Callable[[T, T], T]:
    def fn(x: T, y: T) -> T:
        for n in range(count):
            x = x + y if n % 2 else x * 1.001
        return x

    return fn


def rows(count: int) -> Callable[[T, T], T]:
    """A row's maximum is taken before what it is taken of is computed again."""

    def fn(x: T, y: T) -> T:
        z = chain(count)(x, y)
        return z - z.amax(-1, keepdim=True)

    return fn


@pytest.mark.parametrize("make", [chain, rows])
def test_a_long_chain_for_a_gpu(translated: Callable[..., Code], make: Callable[[int], Any]) -> None:
    code = translated(make(450), torch.randn(64, 20000), torch.randn(20000))
    assert code.kernels >= 1


@pytest.mark.timeout(300)
def test_a_long_chain_on_a_cpu() -> None:
    x, y = torch.randn(4, 8), torch.randn(8)
    got = torch.compile(chain(450), backend="alt", options={"strict": True})(x, y)
    torch.testing.assert_close(got, chain(450)(x, y))
