"""Trace Python functions to graphs, and graphs to terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.lazy_dataclass import dataclass

from ... import decomp
from ...compat import aot_autograd
from .. import simplify
from ..graph import val
from .match import arguments, kind_of
from .terms import Arg, Call, Like, Term

TraceFn = Callable[[Callable[..., object], Sequence[object]], GraphModule]


def fwd_only(fn: Callable[..., object], args: Sequence[object]) -> GraphModule:
    """Return the ATen graph of a function in inference. `args`: tensors, fake or real, and numbers."""
    mode = next((x.fake_mode for x in args if hasattr(x, "fake_mode")), None)
    with torch.no_grad(), aot_autograd.new_tracing_context(), mode or contextlib.nullcontext():
        gm = make_fx(fn, decomp.table(), "fake" if mode is None else "real")(*args)
    return normalised(gm)


def joint_fwd_bwd(fn: Callable[..., object], args: Sequence[object]) -> GraphModule:
    """Return the ATen graph of a function and of its gradients.

    Its inputs are those of the function and the gradients of its results; its results are the function's results and
    the gradients of its inputs.
    """
    with aot_autograd.new_tracing_context():
        gm = aot_autograd.joint_graph(fn, args, decomp.table())
    return normalised(gm)


def normalised(gm: GraphModule) -> GraphModule:
    """Bring a traced graph into the form of the graphs that are searched: no casts or views without effect."""
    simplify.normalise(gm)
    return gm


@dataclass(frozen=True)
class Traced:
    """A pattern that was traced. `names` of all inputs; `outputs`: terms of the results that are calls.

    `positions`: the places of these results among all results of the trace. `with_gradients`: names of the inputs
    whose gradients are among the results.
    """

    names: tuple[str, ...]
    outputs: tuple[Call, ...]
    positions: tuple[int, ...]
    with_gradients: tuple[str, ...] = ()


def results_of(graph: Graph) -> tuple[Any, ...]:
    """Return the results of a graph as a flat tuple."""
    result: object = graph.output_node().args[0]
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def terms_of(gm: GraphModule, names: Sequence[str], scalars: Mapping[str, float], loose: bool) -> Traced:
    """Return the graph as terms. `names` of its inputs; further ones are named by their position.

    `scalars`: numbers that stand for arguments. `loose`: constants that follow from shapes, dtypes and devices match
    all of their kind.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    every = [*names, *(f"tangent_{k}" for k in range(len(inputs) - len(names)))]
    terms: dict[Node, Term] = dict(zip(inputs, map(Arg, every), strict=True))
    shapes = {str(n.target): n for n in inputs}
    assert len(shapes) == len(inputs)
    for n in gm.graph.nodes:
        if n.op == "call_function":
            values = arguments(n.target, n.args, n.kwargs)
            assert values is not None, f"{n} lacks an argument"
            terms[n] = Call((n.target,), tuple(_term(value, terms, scalars, loose) for value in values))
        elif n.op == "get_attr":
            raise ValueError(f"the search function reads the constant {n.target}; make it an argument")
    results = [(k, terms[n]) for k, n in enumerate(results_of(gm.graph)) if isinstance(n, Node)]
    calls = [(k, term) for k, term in results if isinstance(term, Call)]
    return Traced(tuple(every), tuple(term for _, term in calls), tuple(k for k, _ in calls))


def _term(value: object, terms: Mapping[Node, Term], scalars: Mapping[str, float], loose: bool) -> object:
    """Return the term of an argument of a call."""
    if isinstance(value, Node):
        return terms[value]
    if type(value) in (float, int):
        for name, number in scalars.items():
            if value == number:
                return Arg(name)
    if loose and kind_of(value):
        return Like(kind_of(value))
    if isinstance(value, (list, tuple)):
        return tuple(_term(item, terms, scalars, loose) for item in value)
    return value


def values_of(inputs: Mapping[str, object], with_gradients: Collection[str]) -> list[object]:
    """Return the fake values of nodes, and numbers unchanged. Values of the names in `with_gradients` require them."""
    values = {name: val(x) for name, x in inputs.items()}
    for name in with_gradients:
        values[name] = values[name].detach().requires_grad_()
    return list(values.values())
