"""Copy a traced replacement into the graph of a match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ...aten.view import declares_alias
from ...compat import fake_values
from ..graph import aten, attribute, fake_call, val
from ..simplify import same_layout
from .match import Match, equal


@dataclass(frozen=True)
class Splice:
    """A traced graph, the nodes or numbers that its inputs stand for, and the nodes of the symbols that it reads."""

    graph: Graph
    traced: GraphModule
    inputs: Mapping[Node, object]
    symbols: Sequence[tuple[torch.SymInt, Node]]

    @staticmethod
    def given(match: Match, inputs: Sequence[Node]) -> dict[Node, Any]:
        """Return what each input of a traced graph stands for. Arguments of a match are in the order of the inputs."""
        return dict(zip(inputs, match.kwargs.values(), strict=False))

    @classmethod
    def of(cls, match: Match, traced: GraphModule) -> Splice | None:
        """Return the splice of a replacement, or None if it reads a symbolic size that no node of the graph holds."""
        graph = match.outputs[0].graph
        symbols: list[tuple[torch.SymInt, Node]] = []
        before = max(match.outputs)
        for size in _symbols(traced):
            holder = next((n for n in graph.nodes if n < before and _holds(n, size)), None)
            if holder is None:
                return None
            symbols.append((size, holder))
        return cls(graph, traced, cls.given(match, traced.graph.find_nodes(op="placeholder")), symbols)

    def copy(self) -> dict[Node, Any] | None:
        """Copy the calls to the place at which the graph inserts; return the copy of each node.

        Return None, with the graph unchanged, if a call does not take its arguments' strides.
        """
        copies: dict[Node, Any] = dict(self.inputs)
        try:
            self._copy_into(copies)
        except (RuntimeError, ValueError):
            for n in reversed([n for k, n in copies.items() if k not in self.inputs]):
                self.graph.erase_node(n)
            return None
        return copies

    def _copy_into(self, copies: dict[Node, Node]) -> None:
        for n in self.traced.graph.nodes:
            if n.op == "get_attr":
                copies[n] = self._constant(n)
            elif n.op == "call_function":
                args, kwargs = self._resolved((n.args, n.kwargs), copies)
                copies[n] = self.graph.call_function(n.target, args, kwargs)
                copies[n].meta["val"] = _value(n, copies[n])

    def _constant(self, n: Node) -> Node:
        owner = self.graph.owning_module
        assert owner is not None, "a graph that holds constants has a module"
        name, value = f"_pattern_constant_{len(owner.__dict__)}", attribute(self.traced, str(n.target))
        while hasattr(owner, name):
            name += "_"
        owner.register_buffer(name, value)
        copy = self.graph.get_attr(name)
        copy.meta.update(n.meta)
        return copy

    def _resolved(self, value: object, copies: Mapping[Node, object]) -> Any:
        if isinstance(value, Node):
            return copies[value]
        if isinstance(value, torch.SymInt):
            return next(n for size, n in self.symbols if equal(size, value))
        if isinstance(value, dict):
            return {k: self._resolved(v, copies) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._resolved(v, copies) for v in value)
        return value


def _value(traced: Node, copy: Node) -> object:
    """Return the fake value of a copied call. Its arguments have the geometry of those that were traced."""
    fake_value = (
        None
        if declares_alias(traced.target)
        else fake_values.another(val(traced), [val(a) for a in copy.all_input_nodes])
    )
    return fake_call(copy) if fake_value is None else fake_value


def _holds(n: Node, size: torch.SymInt) -> bool:
    return isinstance(val(n), torch.SymInt) and equal(val(n), size)


def _symbols(traced: GraphModule) -> list[torch.SymInt]:
    """Return the symbolic sizes among the arguments of the calls of a graph."""
    symbols: list[torch.SymInt] = []
    for n in traced.graph.nodes:
        flat = torch.utils._pytree.tree_leaves((n.args, n.kwargs)) if n.op == "call_function" else ()
        symbols += [x for x in flat if isinstance(x, torch.SymInt) and not any(equal(x, y) for y in symbols)]
    return symbols


def restored(n: Node, old: torch.Tensor) -> Node:
    """Return a node with the strides of `old`: `n` itself, or a copy of it."""
    if same_layout(val(n), old):
        return n
    strides = old.stride()
    order = sorted(range(old.dim()), key=lambda k: (-strides[k], k))
    graph = n.graph
    steps: list[tuple[Callable[..., object], tuple[Argument, ...], dict[str, Argument]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, ([order.index(k) for k in range(old.dim())],), {}),
    ]
    out = n
    for target, args, kwargs in steps:
        out = graph.call_function(target, (out, *args), kwargs)
        out.meta["val"] = fake_call(out)
    return out


def restorable(old: torch.Tensor) -> bool:
    """Return whether a copy can have the strides of `old`: static ones of a dense tensor."""
    if not all(isinstance(s, int) for s in (*old.shape, *old.stride())):
        return False
    expected = 1
    for stride, size in sorted(zip(old.stride(), old.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return all(old.shape)
