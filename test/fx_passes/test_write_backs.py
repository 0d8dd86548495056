"""Write-backs move behind the last reader of their input, and across nothing that may raise an error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import write_backs
from altbackend.fx_passes.context import Context

T = torch.Tensor
copy_ = torch.ops.aten.copy_.default


def moved(fn: Callable[..., object], *inputs: T) -> tuple[int, list[str]]:
    """Return the number of moved write-backs, and the names of the calls in their order."""
    gm: GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    count = write_backs.run(gm, Context(resolve(), Trace("test", resolve())))
    gm.graph.lint()
    return count, [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function"]


def test_a_write_back_moves_behind_its_last_reader() -> None:
    def step(x: T, y: T) -> None:
        new_x, new_y = x + 1, y * x
        later = torch.sin(new_y)
        x.copy_(new_x)
        y.copy_(later)

    assert moved(step, torch.randn(3), torch.randn(3)) == (1, ["add", "mul", "copy_", "sin", "copy_"])


def test_readers_of_views_count() -> None:
    def step(x: T) -> T:
        row, new = x[0], x + 1
        read = row * 2
        result = read.sin()
        x.copy_(new)
        return result

    assert moved(step, torch.randn(3, 3)) == (1, ["select", "add", "mul", "copy_", "sin"])


def test_calls_that_may_raise_stay_first() -> None:
    def looked_up(x: T, i: T) -> T:
        new = x + 1
        result = torch.index_select(new, 0, i)
        x.copy_(new)
        return result

    def divided(x: T, i: T) -> T:
        new = x + 1
        result = i // (i + 1)
        x.copy_(new)
        return result

    for fn in (looked_up, divided):
        count, calls = moved(fn, torch.randn(3), torch.tensor([0, 1]))
        assert count == 0
        assert calls[-1] == "copy_"


def test_a_returned_input_stays() -> None:
    def step(x: T, y: T) -> tuple[T, T]:
        new = x + 1
        result = y.sin()
        x.copy_(new)
        return x, result

    assert moved(step, torch.randn(3), torch.randn(3))[0] == 0
