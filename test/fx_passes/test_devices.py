"""Graphs over several GPUs are split: on fake tensors, and run on the CPU with assumed devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.fx_passes import devices
from altbackend.runtime.multi_device import MultiDevice, Step, with_drops

T = torch.Tensor


def traced(fn: Any, *places: str) -> torch.fx.GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(4, 8, device=d) for d in places))


def two(x: T, y: T) -> tuple[T, T]:
    a = F.relu(x * 2)
    b = (a.to("cuda:1") + y).sin()
    c = b.to("cuda:0") * a
    return c, b.sum()


def test_every_part_is_on_one_device() -> None:
    parts = devices.parts(traced(two, "cuda:0", "cuda:1"))
    assert not isinstance(parts, str)
    assert [str(p.device) for p in parts] == ["cuda:0", "None", "cuda:1", "None", "cuda:0"]
    for p in parts:
        if p.device is not None:
            assert devices.gpus(p.module) == {p.device}
    assert parts[2].inputs == (parts[1].outputs[0], "y_1")


def test_independent_work_of_a_device_is_one_part() -> None:
    def fn(x: T, y: T) -> tuple[T, ...]:
        return x + 1, y + 1, x * 2, y * 2

    parts = devices.parts(traced(fn, "cuda:0", "cuda:1"))
    assert not isinstance(parts, str)
    assert sorted((str(p.device), len(p.outputs)) for p in parts) == [("cuda:0", 2), ("cuda:1", 2)]


def test_inputs_are_written_last() -> None:
    gm = traced(lambda x, y: (x + 1, (x * 2).to("cuda:1") + y), "cuda:0", "cuda:1")
    x, _, call, *_ = gm.graph.nodes
    with gm.graph.inserting_after(call):
        written = gm.graph.call_function(torch.ops.aten.copy_.default, (x, call))
    written.meta["val"] = x.meta["val"]
    parts = devices.parts(gm)
    assert not isinstance(parts, str)
    assert parts[-1].device is None
    assert parts[-1].module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


def test_symbolic_sizes_are_refused() -> None:
    gm = make_fx(lambda x: x * x.shape[0], tracing_mode="symbolic")(torch.randn(4, 8))
    assert devices.parts(gm) == "its sizes are symbolic"


def test_parts_in_a_row_give_what_the_graph_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators on CPU tensors are assigned to devices in turn."""

    def fn(x: T, y: T) -> tuple[T, ...]:
        a, b = torch.split(x * y, 4, -1)
        c = torch.cat([a.sin(), b.cos()], -1)
        return c + x, a.sum(), y

    gm = make_fx(fn)(torch.randn(4, 8), torch.randn(4, 8))
    assigned = [torch.device("cuda", 0), torch.device("cuda", 1), None]
    order = {n.name: assigned[k % 3] for k, n in enumerate(gm.graph.nodes)}
    monkeypatch.setattr(devices, "_device", lambda n: order[n.name])
    parts = devices.parts(gm)
    assert len(parts) >= 4
    returned: Any = gm.graph.output_node().args[0]
    results: list[str | tuple[Any]] = [a.name for a in returned]
    steps = [Step(lambda args, m=p.module: m(*args), p.inputs, p.outputs) for p in parts]  # type: ignore[misc]
    run = MultiDevice([n.name for n in gm.graph.find_nodes(op="placeholder")], with_drops(steps, results), results)
    inputs = [torch.randn(4, 8), torch.randn(4, 8)]
    for got, want in zip(run(list(inputs)), fn(*inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_what_nothing_needs_any_more_is_dropped() -> None:
    steps = [Step(list, ("a",), ("b",)), Step(list, ("a", "b"), ("c",)), Step(list, ("b",), ("d",))]
    assert [s.dropped for s in with_drops(steps, ["a", "d"])] == [(), (), ("b",)]
    assert [s.dropped for s in with_drops(steps, ["d"])] == [(), ("a",), ("b",)]
