"""Waits move behind independent work; starts keep their order, memory under way is bounded, nothing is overwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import late_waits
from altbackend.fx_passes.context import Context
from altbackend.ir.loops import Extern
from altbackend.lowering.graph import lower_graph
from altbackend.schedule import deps as dependencies

T = torch.Tensor
if not torch.distributed.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)
c10d = torch.ops._c10d_functional


def reduced(x: T) -> T:
    total: T = c10d.all_reduce.default(x, "sum", "0")
    return total


def waited(x: T) -> T:
    result: T = c10d.wait_tensor.default(x)
    return result


def traced(fn: Callable[..., object], *inputs: T) -> GraphModule:
    gm: GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    return gm


def calls(gm: GraphModule, **options: object) -> tuple[int, list[str]]:
    """Return the number of moved waits and the names of the calls in their new order."""
    cfg = resolve(options=options)
    count = late_waits.run(gm, Context(cfg, Trace("test", cfg)))
    gm.graph.lint()
    return count, [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function"]


def two(x: T, y: T) -> T:
    first = waited(reduced(x))
    second = waited(reduced(y))
    return (x.sin() + second) * first


X, Y = torch.randn(4, 4), torch.randn(4, 4)


def test_waits_come_when_they_are_needed() -> None:
    order = ["all_reduce", "all_reduce", "sin", "wait_tensor", "add", "wait_tensor", "mul"]
    assert calls(traced(two, X, Y)) == (2, order)


def test_memory_under_way_is_bounded() -> None:
    one = 2 * X.numel() * X.itemsize  # operand and result
    order = ["all_reduce", "wait_tensor", "all_reduce", "sin", "wait_tensor", "add", "mul"]
    assert calls(traced(two, X, Y), overlap_bytes=one) == (1, order)
    order = ["all_reduce", "wait_tensor", "all_reduce", "wait_tensor", "sin", "add", "mul"]
    assert calls(traced(two, X, Y), overlap_bytes=0) == (0, order)


def test_an_operand_is_overwritten_after_the_wait() -> None:
    def step(x: T, y: T) -> T:
        total = waited(reduced(x))
        x.copy_(y.sin())
        return total + 1

    gm = traced(step, X, Y)
    assert calls(gm)[1] == ["all_reduce", "sin", "wait_tensor", "copy_", "add"]
    program, _ = lower_graph(gm, resolve())
    deps = dependencies.analyse(program)
    (wait,) = (k for k, n in enumerate(program.nodes) if isinstance(n, Extern) and "wait" in str(n.target))
    (write,) = deps.writers[program.inputs[0]]
    assert wait in deps.before[write]


def test_starts_keep_their_order() -> None:
    program, _ = lower_graph(traced(two, X, Y), resolve())
    starts = [k for k, n in enumerate(program.nodes) if isinstance(n, Extern) and "all_reduce" in str(n.target)]
    assert starts[0] in dependencies.analyse(program).before[starts[1]]


def test_results_that_nobody_waits_for_here() -> None:
    gm = traced(lambda x, y: (reduced(x + 1), y.sin()), X, Y)
    assert calls(gm)[1] == ["add", "all_reduce", "sin"]
