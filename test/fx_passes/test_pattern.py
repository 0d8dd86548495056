"""The pattern matcher: terms, matches, traced patterns, and rules in compiled programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.fx_passes.pattern import match as matching
from altbackend.fx_passes.pattern.match import Match
from altbackend.fx_passes.pattern.register import register_replacement
from altbackend.fx_passes.pattern.replacement import Replacement
from altbackend.fx_passes.pattern.rules import Rules
from altbackend.fx_passes.pattern.serial import module_of
from altbackend.fx_passes.pattern.sort import sort
from altbackend.fx_passes.pattern.terms import Arg, Term, call
from altbackend.fx_passes.pattern.trace import fwd_only, joint_fwd_bwd
from altbackend.fx_passes.simplify import normalise
from test.compare import compiled

aten = torch.ops.aten
X, Y, Z = Arg("x"), Arg("y"), Arg("z")
A, B = torch.randn(4, 6), torch.randn(4, 6)
EXAMPLE = [torch.empty(4, 6), torch.empty(4, 6)]


def trace(fn: Callable[..., Any], *args: Any) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def calls(gm: GraphModule, target: Any) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def last(gm: GraphModule) -> Node:
    node = gm.graph.output_node().args[0]
    assert isinstance(node, Node)
    return node


def found(term: Term, fn: Callable[..., Any], *args: Any) -> Match | None:
    return matching.match((term,), last(trace(fn, *args)))


# --- terms ---


def test_python_operators_write_a_pattern() -> None:
    match = found((X * Y + Z) / 2.0, lambda x, y, z: (x * y + z) / 2.0, A, B, torch.randn(4, 6))
    assert match is not None
    assert {name: str(n) for name, n in match.kwargs.items()} == {"x": "x_1", "y": "y_1", "z": "z_1"}


def test_commutative_arguments_match_in_both_orders() -> None:
    pattern = call(aten.exp.default, X) + Y
    assert found(pattern, lambda x, y: x + y.exp(), A, B) is not None
    assert found(call(aten.exp.default, X) - Y, lambda x, y: x - y.exp(), A, B) is None


def test_exchanged_arguments_are_tried_again_deeper_in_the_pattern() -> None:
    """The first order binds x to the wrong node, which only a later term refutes."""
    pattern = (X * Y) - call(aten.sin.default, Y)
    match = found(pattern, lambda a, b: (b * a) - a.sin(), A, B)
    assert match is not None
    assert match.kwargs["y"].name == "a_1"


def test_alternatives() -> None:
    pattern = (call(aten.exp.default, X) | call(aten.sin.default, X)) * 2
    assert found(pattern, lambda x: x.sin() * 2, A) is not None
    assert found(pattern, lambda x: x.cos() * 2, A) is None


def test_a_term_that_stands_twice_matches_one_node() -> None:
    e = call(aten.exp.default, X)
    assert found(e * e, lambda x: (lambda y: y * y)(x.exp()), A) is not None
    assert found(e * e, lambda x: x.exp() * x.exp(), A) is None  # two nodes


def test_a_user_outside_the_match_forbids_it() -> None:
    pattern = call(aten.exp.default, X) * 2
    gm = trace(lambda x: ((y := x.exp()) * 2, y), A)
    (product,) = calls(gm, aten.mul.Tensor)
    assert matching.match((pattern,), product) is None
    assert matching.match((call(aten.exp.default, X, shared=True) * 2,), product) is not None


def test_omitted_arguments_have_the_defaults_of_the_schema() -> None:
    assert found(X + Y, lambda x, y: torch.add(x, y, alpha=2), A, B) is None
    assert found(call(aten.add.Tensor, X, Y, alpha=2), lambda x, y: torch.add(x, y, alpha=2), A, B) is not None


def test_true_is_not_one() -> None:
    assert found(call(aten.sum.dim_IntList, X, [1], True), lambda x: x.sum(1, keepdim=True), A) is not None
    assert found(X * 1, lambda x: x * True, A) is None


def test_several_results() -> None:
    e = call(aten.exp.default, X)
    gm = trace(lambda x: ((y := x.exp()).sin(), y.cos()), A)
    (cos,) = calls(gm, aten.cos.default)
    match = matching.match((call(aten.sin.default, e), call(aten.cos.default, e)), cos)
    assert match is not None
    assert [n.target for n in match.outputs] == [aten.sin.default, aten.cos.default]


# --- traced patterns ---


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu.default(x, approximate="tanh")


def gelu_rules() -> Rules:
    rules = Rules()
    register_replacement(gelu_by_hand, gelu, [torch.empty(8, 8)], keep_gelu, rules)
    return rules


def keep_gelu(fn: Callable[..., Any], args: Any) -> GraphModule:
    return make_fx(fn)(*args) if hasattr(args[0], "fake_mode") else trace(fn, *args)


def prepared(fn: Callable[..., Any], *args: Any) -> GraphModule:
    gm = trace(fn, *args)
    normalise(gm)
    return gm


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (7,)])
def test_a_traced_pattern_fires_once_for_every_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    gm = prepared(lambda x: gelu_by_hand(x) + 1, x)
    (rewrite,) = gelu_rules().apply(gm)
    assert rewrite.rule == "gelu_by_hand"
    assert "gelu" in rewrite.after[0]
    assert len(rewrite.before) == 8
    assert gelu_rules().apply(gm) == []
    gm.recompile()
    gm.graph.lint()
    assert len(calls(gm, aten.gelu.default)) == 1
    torch.testing.assert_close(gm(x), gelu_by_hand(x) + 1)


def row_max(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1, keepdim=True) - x


def negated(x: torch.Tensor) -> torch.Tensor:
    return -(x - x.amax(-1, keepdim=True))


def test_a_match_is_traced_with_its_own_shapes() -> None:
    """The pattern was traced with rank 2, where -1 stands for any dimension; only the last one may match."""
    rules = Rules()
    register_replacement(row_max, negated, [torch.empty(4, 6)], fwd_only, rules)
    x = torch.randn(3, 4, 5)
    assert len(rules.apply(prepared(lambda x: (x.amax(-1, keepdim=True) - x).exp(), x))) == 1
    assert rules.apply(prepared(lambda x: (x.amax(1, keepdim=True) - x).exp(), x)) == []


def test_a_replacement_with_another_dtype_is_refused() -> None:
    rules = Rules()
    register_replacement(lambda x: x.exp() * 2, lambda x: (x.exp() * 2).double(), [A], fwd_only, rules)
    assert rules.apply(prepared(lambda x: (x.exp() * 2).sin(), A)) == []


def test_strides_are_restored() -> None:
    rules = Rules()
    register_replacement(lambda x: x.exp() * 2, lambda x: (x.t().contiguous().exp() * 2).t(), [A], fwd_only, rules)
    gm = prepared(lambda x: x.exp() * 2 + 1, A)
    assert len(rules.apply(gm)) == 1
    gm.recompile()
    assert gm(A).stride() == (6, 1)
    torch.testing.assert_close(gm(A), A.exp() * 2 + 1)


def test_a_result_does_not_become_an_alias() -> None:
    rules = Rules()
    register_replacement(lambda x: x + 0, lambda x: x.view(x.shape), [A], fwd_only, rules)
    assert rules.apply(prepared(lambda x: x + 0, A)) == []


def scaled(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return (x * scale) @ y


def scaled_later(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return (x @ y) * scale


def test_a_number_as_an_argument() -> None:
    rules = Rules()
    inputs = [torch.empty(4, 5), torch.empty(5, 6)]
    register_replacement(scaled, scaled_later, inputs, fwd_only, rules, scalar_workaround={"scale": 0.123})
    x, y = torch.randn(3, 7), torch.randn(7, 2)
    gm = prepared(lambda x, y: scaled(x, y, 2.5).exp(), x, y)
    assert len(rules.apply(gm)) == 1
    gm.recompile()
    torch.testing.assert_close(gm(x, y), (x @ y * 2.5).exp())


def test_an_exclusive_argument_has_no_other_user() -> None:
    rules = Rules()
    register_replacement(
        lambda x, y: x.exp() + y, lambda x, y: y + x.exp(), EXAMPLE, fwd_only, rules, exclusive_arg_names=["y"]
    )
    assert rules.apply(prepared(lambda x, y: (x.exp() + y) * y, A, B)) == []
    assert len(rules.apply(prepared(lambda x, y: (x.exp() + y.sin()).cos(), A, B))) == 1


def test_extra_check_sees_the_match() -> None:
    seen: list[Match] = []
    rules = Rules()
    check = lambda match: seen.append(match)  # noqa: E731
    register_replacement(lambda x: x.exp() * 2, lambda x: x.exp() + x.exp(), [A], fwd_only, rules, extra_check=check)
    assert rules.apply(prepared(lambda x: x.exp() * 2 + 1, A)) == []
    assert seen[0].output_node().target is aten.mul.Tensor


def test_duplicates_are_skipped() -> None:
    rules = Rules()
    added = [
        register_replacement(lambda x: x.exp() * 2, lambda x: x.exp() + 1, [A], fwd_only, rules, skip_duplicates=skip)
        for skip in (False, True, False)
    ]
    assert added == [True, False, True]
    assert len(rules) == 2


def test_names_that_are_no_parameters_are_errors() -> None:
    with pytest.raises(ValueError, match="no parameter 'scale'; it has x"):
        register_replacement(gelu, gelu, [A], fwd_only, Rules(), scalar_workaround={"scale": 2.0})
    with pytest.raises(ValueError, match="takes 1 arguments; 2 are given"):
        register_replacement(gelu, gelu, [A, B], fwd_only, Rules())


def test_rules_of_one_node_are_tried_in_the_order_of_registration() -> None:
    order: list[str] = []
    rules = Rules()

    def noted(name: str) -> Callable[[Match], None]:
        return lambda match: order.append(name)

    for name, fn in (("first", lambda x: x.exp() * 2), ("second", lambda x: x * 2), ("third", lambda x: x.exp() * 2)):
        register_replacement(fn, fn, [A], fwd_only, rules, extra_check=noted(name))
    rules.apply(prepared(lambda x: (x.exp() * 2).sin(), A))
    assert order == ["first", "second", "third"]


def test_symbolic_sizes() -> None:
    rules = Rules()
    register_replacement(
        lambda x: x.exp().reshape(-1), lambda x: x.reshape(x.shape[0] * x.shape[1]).exp(), [A], fwd_only, rules
    )
    run = compiled(lambda x: x.exp().reshape(-1).sin() * 2, dynamic=True, post_grad_custom_pre_pass=rules)
    for n in (3, 5, 8):
        x = torch.randn(n, 4)
        torch.testing.assert_close(run(x), x.exp().reshape(-1).sin() * 2)


def test_a_replacement_that_fails_names_its_rule() -> None:
    rules = Rules()
    register_replacement(gelu_by_hand, lambda x: x.view(-1, 1000), [torch.empty(8, 8)], fwd_only, rules)
    with pytest.raises(RuntimeError, match=r"the replacement of the rule gelu_by_hand failed: .*refuse the match"):
        rules.apply(prepared(lambda x: gelu_by_hand(x) + 1, A))


# --- joint graphs ---


def silu_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def test_a_joint_pattern_replaces_forward_and_backward() -> None:
    rules = Rules()
    register_replacement(
        silu_by_hand, torch.nn.functional.silu, [torch.empty(4, 6, requires_grad=True)], joint_fwd_bwd, rules
    )
    seen: list[int] = []

    def hook(graph: torch.fx.Graph) -> None:
        seen.append(len(rules.apply(graph)))
        targets = {n.target for n in graph.nodes}
        assert aten.silu.default in targets
        assert aten.sigmoid_backward.default not in targets

    x = torch.randn(5, 7, requires_grad=True)
    y = compiled(lambda x: silu_by_hand(x).exp(), joint_custom_pre_pass=hook)(x)
    y.sum().backward()
    assert seen == [1]
    expected = x.detach().clone().requires_grad_()
    torch.nn.functional.silu(expected).exp().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


# --- order ---


def test_sort_moves_nodes_behind_their_arguments() -> None:
    gm = trace(lambda x: (x.exp() + 1).sin(), A)
    names = [n.name for n in gm.graph.nodes]
    exp = calls(gm, aten.exp.default)[0]
    gm.graph.output_node().prepend(exp)
    assert sort(gm.graph) > 0
    gm.graph.lint()
    assert [n.name for n in gm.graph.nodes] == names
    assert sort(gm.graph) == 0


def test_sort_names_nodes_that_depend_on_each_other() -> None:
    gm = trace(lambda x: x.exp().sin(), A)
    exp, sin = calls(gm, aten.exp.default)[0], calls(gm, aten.sin.default)[0]
    exp.args = (sin,)
    with pytest.raises(ValueError, match=r"depend on each other: exp, (output, )?sin"):
        sort(gm.graph)


# --- text ---


def test_a_pattern_as_text_equals_itself() -> None:
    rules = gelu_rules()
    (rule,) = rules
    assert isinstance(rule, Replacement)
    text = module_of("test", {"gelu": rule.pattern}).replace("from ..", "from altbackend.fx_passes.")
    scope: dict[str, Any] = {}
    exec(text, scope)
    again = Rules()
    loaded = scope["PATTERNS"]["gelu"]()
    register_replacement(gelu_by_hand, gelu, [A], keep_gelu, again, search_fn_pattern=loaded)
    assert len(again.apply(prepared(lambda x: gelu_by_hand(x) + 1, A))) == 1
