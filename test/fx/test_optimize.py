"""`inline`, `optimize` and `freeze_module` on exported and traced models: fewer nodes, equal results."""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from altbackend import fx
from altbackend.fx_passes.idioms import emit
from test.compare import difference

T = torch.Tensor
aten = torch.ops.aten


class Normalised(nn.Module):
    """A convolution, its normalisation with constants, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: T) -> T:
        return F.relu(self.norm(self.conv(x)) + x * 1)


class Positions(nn.Module):
    """Adds position embeddings, which depend on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x: T) -> T:
        return x + self.table(torch.arange(x.shape[1])) * 2.0


class Attention(nn.Module):
    """Multi-head attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: T) -> T:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v
        return self.out(F.dropout(mixed, 0.1, self.training).transpose(1, 2).reshape(b, n, c))


class Twice(nn.Module):
    """Equal calls, views that cancel, and dead code."""

    def forward(self, x: T) -> T:
        unused = x.sin() * 3
        del unused
        y = x.t().t() + x.exp() * x.exp()
        return torch.cat([torch.cat([y, x], 1), y.view(-1).view(x.shape)], 1)


class Scaled(nn.Module):
    """A weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.rand(4, 1))

    def forward(self, x: T) -> T:
        return F.linear(x, self.weight * self.scale.exp())


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    count: T

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: T) -> T:
        self.count.add_(1)
        return self.linear(x) * self.count


class Nested(nn.Module):
    """Modules in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)))

    def forward(self, x: T) -> T:
        return self.blocks(x) + 0.5


class Gated(nn.Module):
    """A gate, a reduction and a comparison with a constant tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limits", torch.linspace(-1, 1, 8))
        self.gate = nn.Linear(8, 16)

    def forward(self, x: T) -> T:
        limits = self.get_buffer("limits").abs() + 1
        a, b = self.gate(x).chunk(2, -1)
        return torch.where(a > limits, a, limits) * torch.sigmoid(b).to(torch.float32)


class Recurrent(nn.Module):
    """A cell that is applied three times, with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: T) -> T:
        h = torch.zeros_like(x)
        for _ in range(3):
            h = torch.tanh(self.cell(x) + h)
        return h


class Pooled(nn.Module):
    """Strided convolutions, pooling, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.SiLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x: T) -> T:
        return self.head(self.stem(x).mean((2, 3)).clone())


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
MODELS: dict[str, Case] = {
    "normalised": (Normalised, (2, 3, 6, 6)),
    "positions": (Positions, (2, 5, 8)),
    "attention": (Attention, (2, 5, 8)),
    "twice": (Twice, (4, 6)),
    "scaled": (Scaled, (3, 8)),
    "counter": (Counter, (3, 8)),
    "nested": (Nested, (3, 8)),
    "gated": (Gated, (3, 8)),
    "recurrent": (Recurrent, (3, 8)),
    "pooled": (Pooled, (2, 3, 9, 9)),
}
# Nodes after export, after `optimize`, and after `freeze_module`.
FEWER_OPTIMISED = ("normalised", "attention", "twice", "gated", "recurrent", "pooled")
FEWER_FROZEN = ("normalised", "positions", "attention", "twice", "scaled", "gated", "recurrent", "pooled")


def exported(name: str) -> tuple[nn.Module, torch.export.ExportedProgram, T]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        return model, torch.export.export(copy.deepcopy(model), (x,)), x


def size(gm: GraphModule) -> int:
    return len(gm.graph.nodes)


def same(got: GraphModule, model: nn.Module, x: T) -> None:
    with torch.no_grad():
        for scale in (1.0, 0.5, 2.0):
            assert difference(got(x * scale), model(x * scale), None, 1e-5) == ""


@pytest.mark.parametrize("name", list(MODELS))
def test_optimize_an_exported_model(name: str) -> None:
    model, program, x = exported(name)
    before = size(program.module())
    gm = fx.optimize(program)
    same(gm, model, x)
    assert size(gm) < before if name in FEWER_OPTIMISED else size(gm) <= before
    after = size(gm)
    assert size(fx.optimize(gm)) == after


@pytest.mark.parametrize("name", list(MODELS))
def test_freeze_an_exported_model(name: str) -> None:
    model, program, x = exported(name)
    before = size(program.module())
    gm = fx.freeze_module(program)
    same(gm, model, x)
    assert size(gm) < before if name in FEWER_FROZEN else size(gm) <= before
    assert not list(gm.parameters())
    assert gm.mutable_attributes == (("count",) if name == "counter" else ())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("positions", "attention", "counter")])
def test_freeze_a_traced_model(name: str) -> None:
    model, _, x = exported(name)
    gm = fx.freeze_module(symbolic_trace(copy.deepcopy(model)))
    same(gm, model, x)
    assert not gm.graph.find_nodes(op="call_module")
    assert not list(gm.parameters())


def test_the_original_is_not_changed() -> None:
    model, _, x = exported("scaled")
    traced = symbolic_trace(model)
    nodes, names = size(traced), [name for name, _ in traced.named_parameters()]
    fx.freeze_module(traced)
    assert (nodes, names) == (size(traced), [name for name, _ in traced.named_parameters()])
    same(traced, model, x)


def test_preserved_attributes_may_change() -> None:
    model, _, x = exported("scaled")
    gm = fx.freeze_module(symbolic_trace(model), preserved_attrs=["scale"])
    same(gm, model, x)
    with torch.no_grad():
        gm.get_parameter("scale").zero_()
    torch.testing.assert_close(gm(x), F.linear(x, model.get_parameter("weight")))


def test_parameters_are_kept_on_demand() -> None:
    model, _, x = exported("gated")
    gm = fx.freeze_module(symbolic_trace(model), preserve_parameters=True)
    same(gm, model, x)
    assert {name for name, _ in gm.named_parameters()} == {"gate.weight", "gate.bias"}
    assert not any("abs" in str(n.target) for n in gm.graph.nodes)  # the buffer is folded


def test_interfaces_stay_on_demand() -> None:
    model, _, x = exported("nested")
    gm = fx.freeze_module(symbolic_trace(model), freeze_interfaces=False)
    same(gm, model, x)
    assert gm.graph.find_nodes(op="call_module")
    assert list(gm.parameters())


def test_what_cannot_be_frozen() -> None:
    model, _, _ = exported("scaled")
    with pytest.raises(ValueError, match="training mode"):
        fx.freeze_module(symbolic_trace(model.train()))
    with pytest.raises(ValueError, match="'missing', which the module does not have"):
        fx.freeze_module(symbolic_trace(model.eval()), preserved_attrs=["missing"])
    with pytest.raises(TypeError, match="a Scaled has no graph"):
        fx.freeze_module(model)  # type: ignore[arg-type]
    traced = symbolic_trace(nn.Sequential(model)).eval()
    with traced.graph.inserting_before(traced.graph.output_node()):
        itself = traced.graph.get_attr("0")
    traced.graph.output_node().args = (itself,)
    with pytest.raises(ValueError, match="returns itself or its module '0'"):
        fx.freeze_module(traced)


def test_inline_submodules_and_regions() -> None:
    @torch.compiler.nested_compile_region
    def region(x: T) -> T:
        return x.sin() + 1

    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    x = torch.randn(4)
    torch._dynamo.reset()
    want = torch.compile(lambda x: region(x) * region(x + 1), backend=keep)(x)
    (gm,) = graphs
    assert any("invoke_subgraph" in str(n.target) for n in gm.graph.nodes)
    inlined = fx.inline(gm)
    assert not any("invoke_subgraph" in str(n.target) or n.op == "get_attr" for n in inlined.graph.nodes)
    torch.testing.assert_close(inlined(x)[0], want)


def test_inline_keeps_modules_with_hooks_and_without_graphs() -> None:
    class Branches(nn.Module):
        def forward(self, x: T) -> T:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), Branches(), nn.Linear(4, 4))
    model[2].register_forward_hook(lambda module, args, result: result + 1)

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, path: str) -> bool:
            return True

    gm = fx.inline(GraphModule(model, Leaves().trace(model)))
    assert [n.target for n in gm.graph.find_nodes(op="call_module")] == ["1", "2"]
    x = torch.randn(3, 4)
    torch.testing.assert_close(gm(x), model(x))


def test_inline_a_constant_condition() -> None:
    class Model(nn.Module):
        def forward(self, x: T, flag: T) -> T:
            result: T = torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x,))
            return result

    gm = torch.export.export(Model(), (torch.randn(3), torch.tensor(True))).module()
    assert isinstance(gm, GraphModule)
    (cond,) = [n for n in gm.graph.nodes if "cond" in str(n.target)]
    cond.update_arg(0, False)
    gm = fx.inline(gm)
    x = torch.randn(3)
    torch.testing.assert_close(gm(x, torch.tensor(True)), x.cos())
    assert not any(str(n.target) == "cond" for n in gm.graph.nodes)


class Loop(nn.Module):
    """Doubles x until its sum is at least the limit."""

    def forward(self, x: T, limit: T) -> tuple[T, T]:
        count = torch.zeros((), dtype=torch.int64)
        result: tuple[T, T] = torch._higher_order_ops.while_loop(
            lambda x, count: x.sum() < limit, lambda x, count: (x * 2, count + 1), (x, count)
        )
        return result


@pytest.mark.sample(2)
@pytest.mark.parametrize("limit", [0.0, 5.0, 100.0, 1000.0])
def test_unroll_loops(limit: float) -> None:
    x, bound = torch.ones(3), torch.tensor(limit)
    program = torch.export.export(Loop(), (x, bound))
    gm = fx.optimize(program, unroll_non_constant_loops=True)
    (loop,) = [n for n in gm.graph.nodes if str(n.target) == "while_loop"]
    body = gm.get_submodule(str(loop.args[1].target))
    assert isinstance(body, GraphModule)
    assert any(str(n.target) == "cond" for n in body.graph.nodes)
    for got, want in zip(gm(x, bound), Loop()(x, bound), strict=True):
        torch.testing.assert_close(got, want)


class Pair:
    """A class of the user."""

    made = 0

    def __init__(self, a: int, b: int) -> None:
        Pair.made += 1
        self.total = a + b


def test_objects_of_user_classes() -> None:
    def program(x: T) -> T:
        pair = x.tracer.create_proxy("call_function", Pair, (2, 3), {})  # type: ignore[attr-defined]
        return x * pair.total

    x = torch.randn(3)
    for folded in (False, True):
        gm = fx.optimize(symbolic_trace(program), const_prop_user_classes=folded)
        Pair.made = 0
        torch.testing.assert_close(gm(x), x * 5)
        assert Pair.made == (not folded)


def test_random_calls_and_returned_constants_are_not_folded() -> None:
    def program(x: T) -> tuple[T, T]:
        return x + emit(x, torch.rand, 3), emit(x, torch.arange, 3) * 2

    gm = fx.optimize(symbolic_trace(program))
    x = torch.zeros(3)
    assert not torch.equal(gm(x)[0], gm(x)[0])
    gm(x)[1].zero_()
    assert gm(x)[1].tolist() == [0, 2, 4]


def test_rules_of_the_user() -> None:
    rules = fx.Rules()
    fx.register_replacement(
        lambda x: x.sin() * 2, lambda x: x.sin() + x.sin(), [torch.empty(3)], fx.fwd_only, rules, skip_duplicates=True
    )
    gm = fx.fwd_only(lambda x: x.sin() * 2 + 1, [torch.randn(3)])
    (rewrite,) = rules.apply(gm)
    gm.recompile()
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), x.sin() * 2 + 1)
    assert str(rewrite).startswith("sin: aten.sin.default, mul: aten.mul.Tensor -> ")


PAGE = Path(__file__).parents[2] / "docs" / "graph-optimisation.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_of_the_page_run(number: int, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(BLOCKS[number], encoding="utf-8")
    torch._dynamo.reset()
    assert "torch" in runpy.run_path(str(program))  # the page's own assertions have held
