"""Updates in place on the GPU's path: Triton's interpreter runs the generated kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func

from altbackend import fx_passes
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.ir.loops import Scatter
from test import triton_run
from test.graphs import backend, schedule

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
T = torch.Tensor


def rows_by_index(x: T, i: T, v: T) -> T:
    x.index_put_((i,), v)
    return x.sum(1)


def parts(x: T, i: T, v: T) -> T:
    x[2:5, 8:40] = v[:, 8:40]
    x[:, 3] = x[:, 4] + 1
    return x[2:5] * 2


def sums(x: T, i: T, v: T) -> T:
    x.mul_(0.5)
    x.index_add_(0, i, v)
    return x[0] * 1


@pytest.mark.parametrize("fn", [rows_by_index, parts, sums], ids=lambda f: f.__name__)
def test_update(fn: Callable[..., Any]) -> None:
    cfg = resolve()
    written: list[str] = []

    def lower(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        gm = fx_passes.finish(fx_passes.post_grad(gm, cfg, Trace("test", cfg)), cfg)
        s = schedule(gm, cfg, triton_run.TARGET)
        written.extend(n.out for n in s.program.nodes if isinstance(n, Scatter) and n.out in s.program.inputs)
        steps = triton_run.steps_of(s)
        return make_boxed_func(lambda *xs: triton_run.run(s.program, steps, xs, s.constants))

    x, i, v = torch.randn(50, 64), torch.tensor([5, 1, 7]), torch.randn(3, 64)
    twin = x.clone()
    want = fn(x, i, v)
    got = torch.compile(fn, backend=backend(lower), dynamic=False, fullgraph=True)(twin, i, v)
    torch.testing.assert_close([got, twin], [want, x])
    assert bool(written) == (fn is not parts)
