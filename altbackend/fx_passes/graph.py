"""Small tools that every graph pass shares."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat import torch_api

aten = torch.ops.aten


def val(n: Any) -> Any:
    """The traced fake value of a node, or the constant itself."""
    return n.meta.get("val") if isinstance(n, Node) else n


def is_call(n: Any, *targets: Any) -> bool:
    return isinstance(n, Node) and n.op == "call_function" and n.target in targets


def only_user(n: Node) -> Node | None:
    """The single user of a node, or None."""
    return next(iter(n.users)) if len(n.users) == 1 else None


def snapshot(graph: Graph) -> Callable[[], Graph]:
    """What makes the graph as it is now once more, after passes have changed it; what nodes refer to is shared.

    Remembering takes a fiftieth of the time of a copy, which is only made where a pass has failed.
    """
    held = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes]
    tracer, codegen = graph._tracer_cls, graph._codegen

    def restore() -> Graph:
        out, made = Graph(tracer_cls=tracer), dict[Node, Node]()
        for n, op, target, args, kwargs, name, kind, meta in held:
            mine = torch.fx.node.map_arg((args, kwargs), made.__getitem__)
            made[n] = out.create_node(op, target, *mine, name, kind)
            made[n].meta = dict(meta)
        out.set_codegen(codegen)
        return out

    return restore


def drop_dead(graph: Graph) -> None:
    """Remove calls whose results nobody reads and that do nothing else, in place."""
    random = torch_api.keeps_unread_random()
    # whether a call does anything else takes long to ask, and only matters where nobody reads it
    graph.eliminate_dead_code(lambda n: bool(n.users) or n.is_impure(random))


class Purity:
    """Whether a call may be made once instead of twice. Every operator is looked up once, so one is made per pass."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def __call__(self, n: Node) -> bool:
        if not isinstance(n.target, torch._ops.OpOverload):
            return self._look_up(n)
        if n.target not in self._known:
            self._known[n.target] = self._look_up(n)
        return self._known[n.target]

    @staticmethod
    def _look_up(n: Node) -> bool:
        schema = getattr(n.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return False
        return torch.Tag.nondeterministic_seeded not in getattr(n.target, "tags", ()) and not n.is_impure()


def insert(graph: Graph, before: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Node:
    """A call placed before a node, its fake value computed from its arguments'."""
    with graph.inserting_before(before):
        new = graph.call_function(target, args, kwargs or {})
    new.meta["val"] = fake_call(new)
    if "stack_trace" in before.meta:
        new.meta["stack_trace"] = before.meta["stack_trace"]
    return new


def fake_call(n: Node) -> Any:
    """Run a call on its arguments' fake values."""
    args = torch.fx.node.map_arg(n.args, val)
    kwargs = torch.fx.node.map_arg(n.kwargs, val)
    mode = fake_mode(n.graph)
    with torch.no_grad():
        if mode is None:
            return n.target(*args, **kwargs)  # type: ignore[operator]
        with mode:
            return n.target(*args, **kwargs)  # type: ignore[operator]


def complete(gm: GraphModule) -> None:
    """Give every node that has none its fake value: torch's partitioner and users' passes add nodes without."""
    mode = fake_mode(gm.graph)
    for n in gm.graph.nodes:
        held = val(n)
        if n.op == "get_attr" and "val" not in n.meta:
            held = attribute(gm, str(n.target))
        if n.op == "call_function" and "val" not in n.meta:
            # one of several results is the value among them, not an alias of it
            n.meta["val"] = val(n.args[0])[n.args[1]] if n.target is operator.getitem else fake_call(n)
        elif mode is not None and isinstance(held, torch.Tensor) and not hasattr(held, "fake_mode"):
            n.meta["val"] = mode.from_tensor(held)


def attribute(gm: GraphModule, path: str) -> Any:
    """What a `get_attr` node stands for."""
    held: Any = gm
    for part in path.split("."):
        held = getattr(held, part)
    return held


def fake_mode(graph: Graph) -> Any:
    """The fake-tensor mode that traced the graph, or None."""
    for n in graph.nodes:
        held = val(n)
        if isinstance(held, torch.Tensor) and hasattr(held, "fake_mode"):
            return held.fake_mode
    return None


def replace(old: Node, new: Node, keep_meta: bool = False) -> None:
    """Give every user of `old` the node `new`, and drop `old`."""
    if keep_meta:
        new.meta = dict(old.meta)
    if "root" in old.meta:  # results are views of it
        new.meta["root"] = old.meta["root"]
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def propagate(gm: GraphModule, nodes: Iterable[Node] | None = None) -> None:
    """Recompute the fake values of calls whose arguments' strides changed; the rest keep theirs."""
    changed: set[Node] = set(nodes or ())
    for n in gm.graph.nodes:
        update(n, changed)


def update(n: Node, changed: set[Node]) -> None:
    """Recompute the fake value of one call if an argument is among `changed`; adds it there if its layout is new."""
    if n.op != "call_function" or n.meta.get("fixed_val") or not any(a in changed for a in n.all_input_nodes):
        return
    new = _again(n)
    if layout(new) != layout(n.meta.get("val")):
        changed.add(n)
    n.meta["val"] = new


def _again(n: Node) -> Any:
    """The fake value of a call under its arguments' new strides; a view that they rule out becomes a reshape."""
    if n.target not in (aten.view.default, aten._unsafe_view.default):
        return fake_call(n)
    try:
        return fake_call(n)
    except (RuntimeError, ValueError):
        n.target = aten.reshape.default
        return fake_call(n)


def layout(x: Any) -> Any:
    """Shape, strides and dtype of a fake value, or of each of several."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), tuple(x.stride()) if x.layout == torch.strided else None, x.dtype
    return tuple(layout(y) for y in x) if isinstance(x, (tuple, list)) else x


def dtype_of(n: Node) -> torch.dtype:
    dtype: torch.dtype = n.meta["val"].dtype
    return dtype
