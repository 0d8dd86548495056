"""Every idiom fires on its example, once, and gives the same results; aliases that somebody could notice stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node, symbolic_trace

from altbackend import fx
from altbackend.fx_passes import idioms
from altbackend.fx_passes.aliases import Aliases
from altbackend.fx_passes.idioms import IDIOMS, Idiom
from test.compare import difference

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *inputs: Any) -> GraphModule:
    """Trace Python functions, and give every node its fake value."""
    gm = symbolic_trace(fn)
    mode = FakeTensorMode()

    class Values(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            n.meta["example_value"] = value
            return value

    with mode:
        Values(gm).run(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs))
    return gm


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_an_idiom(idiom: Idiom) -> None:
    inputs = idiom.inputs()
    gm = traced(idiom.example, *inputs)
    fired = [rewrite.rule for rewrite in idioms.apply(gm.graph, addmm=True)]
    assert fired.count(idiom.name) == 1, fired
    assert idiom.name not in [rewrite.rule for rewrite in idioms.apply(gm.graph, addmm=True)]
    result = fx.peephole(gm, addmm_fusion=True)
    assert difference(result(*inputs), idiom.example(*inputs), None, 1e-6) == ""


@pytest.mark.parametrize("kind", ["shape", "addmm"])
def test_kinds_are_switched(kind: str) -> None:
    for idiom in (i for i in IDIOMS if i.kind == kind):
        gm = traced(idiom.example, *idiom.inputs())
        fired = [rewrite.rule for rewrite in idioms.apply(gm.graph, addmm=False, shapes=False)]
        assert idiom.name not in fired


STAY: dict[str, Callable[..., Any]] = {
    "a returned copy": lambda x: aten.clone.default(x),
    "a written copy": lambda x: (y := aten.clone.default(x), aten.add_.Tensor(y, 1), y.sum())[2],
    "a copy of what is written": lambda x: (y := aten.clone.default(x), aten.add_.Tensor(x, 1), y + 0)[2],
    "a view of a written copy": lambda x: (y := aten.clone.default(x), aten.mul_.Tensor(aten.t.default(y), 2), x + y)[
        2
    ],
}


@pytest.mark.parametrize("name", list(STAY))
def test_copies_stay_where_they_can_be_told_apart(name: str) -> None:
    gm = symbolic_trace(STAY[name])
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 4)
        for n in gm.graph.nodes:
            n.meta["val"] = x
    x = torch.randn(4, 4)
    want_x = x.clone()
    want = STAY[name](want_x)
    result = fx.optimize(gm)
    assert any("clone" in str(n.target) for n in result.graph.nodes)
    got = result(x)
    assert torch.equal(got, want)
    assert torch.equal(x, want_x)
    assert got.data_ptr() != x.data_ptr()


def test_a_copy_that_nobody_can_tell_apart_goes() -> None:
    gm = symbolic_trace(lambda x: aten.exp.default(aten.clone.default(x)))
    with FakeTensorMode():
        for n in gm.graph.nodes:
            n.meta["val"] = torch.empty(4, 4)
    assert not any("clone" in str(n.target) for n in fx.peephole(gm).graph.nodes)


def test_symbolic_sizes_are_not_constants() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0] * 6)

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Model(), (torch.randn(4, 6),), dynamic_shapes={"x": {0: rows}})
    gm = fx.peephole(program)
    assert gm(torch.randn(7, 6)).shape == (42,)


def test_aliases_of_methods_and_functions() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.view(-1)
        z.add_(1)
        return y.exp().add_(1)

    gm = symbolic_trace(program)
    x, y = gm.graph.find_nodes(op="placeholder")
    aliases = Aliases(gm.graph)
    assert aliases.written(x)
    assert not aliases.returned(x)
    assert aliases.written(y)  # `exp` has no schema here
