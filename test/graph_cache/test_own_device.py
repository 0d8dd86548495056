"""Ranks on different GPUs share entries, which leave out the number of a graph's only GPU. No GPU is needed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.codegen.host import cuda_program
from altbackend.compiled.artifact import Code
from altbackend.compiled.load import Job
from altbackend.compiled.replay import Facts
from altbackend.config.resolve import resolve
from altbackend.graph_cache import backward_text, entry, key, lookup, own_device, traced
from altbackend.ir.loops import Extern
from test import triton_run
from test.graphs import schedule

T = torch.Tensor
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "gpu", lambda device: {"name": "H200"})


def graph(*numbers: int) -> GraphModule:
    """A graph over these GPUs that also calls an operator with a device."""

    def fn(*xs: T) -> Any:
        order = aten.randperm.default(4, device=xs[0].device, pin_memory=False)
        return [torch.sort(x + 1)[0] for x in xs], order

    with FakeTensorMode():
        return make_fx(fn, decomposition_table=decomp.table())(*(torch.empty(4, device=f"cuda:{n}") for n in numbers))


def query(gm: GraphModule) -> lookup.Query:
    found = lookup._query(gm, resolve(options={"cache_graphs": True}), asdict(Job("inference")))
    assert isinstance(found, lookup.Query), found
    return found


def test_the_key_does_not_depend_on_the_number_of_the_gpu() -> None:
    first, second = query(graph(0)), query(graph(3))
    assert first.path.name == second.path.name
    assert (first.gpu, second.gpu) == (0, 3)
    assert "cuda:3" not in json.dumps(second.parts)


def captured(*numbers: int) -> traced.Query:
    with FakeTensorMode():
        xs = [torch.empty(4, device=f"cuda:{n}") for n in numbers]
    gm = torch.fx.symbolic_trace(lambda x, y: (x + 1, torch.nn.functional.gelu(y).to(torch.float64)))
    for n, x in zip(gm.graph.nodes, [*xs, xs[0], xs[1], xs[1]], strict=False):
        n.meta["example_value"] = x
    found = traced.query_of(gm, xs, resolve(options={"cache_graphs": True}))
    assert not isinstance(found, str), found
    return found


def test_the_key_of_a_captured_graph() -> None:
    first, second = captured(0, 0), captured(2, 2)
    assert first.path.name == second.path.name
    assert (first.gpu, second.gpu) == (0, 2)


def test_a_graph_over_several_gpus_keeps_the_numbers() -> None:
    first, second = captured(0, 1), captured(0, 2)
    assert first.path.name != second.path.name
    assert first.gpu is second.gpu is None


def host_text(number: int) -> str:
    """The host program of a graph that calls an operator with a device."""
    s = schedule(graph(number), resolve(), triton_run.TARGET)
    p, steps = s.program, list[cuda_program.Step]()
    for n, step in enumerate(triton_run.steps_of(s)):
        if isinstance(step, Extern):
            steps.append(step)
        else:
            p, more = cuda_program.launches(p, step[0], step[1], (), n)
            steps += more
    return cuda_program.build(p, steps).python


def test_host_programs_are_equal() -> None:
    first, second = host_text(0), host_text(1)
    assert first == second
    assert 'device=torch.device("cuda", DEVICE)' in first


def test_an_entry_is_read_for_the_gpu_at_hand() -> None:
    gpu = torch.device("cuda", 1)
    text = "op(torch.device('cuda:1'))"
    code = Code(gpu, text, 1, 1, constants={"where": gpu}, recording=Facts("", (), False, 1))
    stored = json.loads(json.dumps(own_device.without_number(entry.write(code, {}), 1)))
    assert "cuda:1" not in json.dumps(stored)
    read = entry.read(own_device.with_number(stored, 5), GraphModule({}, torch.fx.Graph()))
    assert read.device == read.constants["where"] == torch.device("cuda", 5)
    assert read.recording is not None
    assert read.recording.device == 5
    assert read.python == "op(torch.device('cuda:5'))"


def test_the_operators_of_a_backward() -> None:
    stored = backward_text.write(graph(1), 1)
    assert stored == backward_text.write(graph(0), 0)
    with FakeTensorMode():
        (values, order) = backward_text.read(stored, 6)(torch.empty(4, device="cuda:6"))
    assert values[0].device == order.device == torch.device("cuda", 6)
