"""The verifier detects passes that change shared storage, writes to inputs, or the order of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.fx_passes import verify
from altbackend.ir.verify import InvalidIR

T = torch.Tensor
aten = torch.ops.aten


def graph() -> GraphModule:
    def fn(x: T, y: T) -> tuple[T, ...]:
        a = x + 1
        b = a.clone()
        return a, a.t(), b, y.view(-1), torch.split(b * 2, 2)[1]

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4))
    x, *_ = gm.graph.find_nodes(op="placeholder")
    out = gm.graph.output_node()
    with gm.graph.inserting_before(out):
        gm.graph.call_function(aten.copy_.default, (x, the(gm, aten.mul.Tensor))).meta["val"] = x.meta["val"]
    return gm


def the(gm: GraphModule, target: object) -> Node:
    (n,) = (n for n in gm.graph.nodes if n.target is target)
    return n


def test_facts_of_a_graph() -> None:
    facts = verify.facts(graph())
    assert facts.shared == (0, 0, 2, "y_1", 4)
    assert facts.written == {"x_1"}
    assert facts.results[1] == "torch.float32[4, 4] on cpu"


def drop_clone(gm: GraphModule) -> None:
    clone = the(gm, aten.clone.default)
    clone.replace_all_uses_with(clone.args[0])  # type: ignore[arg-type]


def copy_view(gm: GraphModule) -> None:
    view = the(gm, aten.t.default)
    view.target = aten.t_copy.default


def return_input(gm: GraphModule) -> None:
    add = the(gm, aten.add.Tensor)
    add.replace_all_uses_with(add.args[0])  # type: ignore[arg-type]


def forget_write(gm: GraphModule) -> None:
    gm.graph.erase_node(the(gm, aten.copy_.default))


def write_too_early(gm: GraphModule) -> None:
    add = the(gm, aten.add.Tensor)
    with gm.graph.inserting_before(add):
        gm.graph.call_function(aten.zero_.default, (add.args[0],))


def another_dtype(gm: GraphModule) -> None:
    clone = the(gm, aten.clone.default)
    clone.meta["val"] = clone.meta["val"].double()


def out_of_order(gm: GraphModule) -> None:
    gm.graph.find_nodes(op="placeholder")[-1].append(the(gm, aten.clone.default))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (drop_clone, "shared of the graph were"),
        (copy_view, "shared of the graph were"),
        (return_input, "shared of the graph were"),
        (forget_write, "written of the graph were"),
        (write_too_early, "reads x_1 after zero_"),
        (another_dtype, "results of the graph were"),
        (out_of_order, "before it has been defined"),
    ],
)
def test_a_pass_that_breaks_something_is_named(broken: Callable[[GraphModule], None], said: str) -> None:
    gm = graph()
    before = verify.facts(gm)
    verify.check(before, gm, "nothing")
    broken(gm)
    with pytest.raises(InvalidIR, match=f"after a broken pass: .*{said}"):
        verify.check(before, gm, "a broken pass")
