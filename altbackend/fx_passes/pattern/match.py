"""Find a term in a graph. The search backtracks over alternatives and exchanged arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from altbackend.lazy_dataclass import dataclass

from ..graph import val
from .terms import Anything, Arg, Call, Like, OneOf, Term

Bindings = Mapping[Term, Any]  # the argument or call that each term of a pattern stands for
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Match:
    """A match. `kwargs`: node or number of each argument; `outputs`: nodes of the pattern's results; `nodes`: all."""

    kwargs: Mapping[str, Any]
    outputs: tuple[Node, ...]
    nodes: tuple[Node, ...]

    def output_node(self) -> Node:
        """Return the node of the only result."""
        (node,) = self.outputs
        return node


def match(outputs: Sequence[Term], node: Node) -> Match | None:
    """Return the first match in which `node` is the last of a pattern's results, or None.

    Nodes of other results are looked for among the users of what the match contains already. A call inside the
    pattern must have no users outside it, unless its term is `shared`.
    """
    for bindings in _terms(outputs[-1], node, {}):
        for everything in _others(list(outputs[:-1]), bindings):
            if (whole := _closed(outputs, everything)) is not None:
                return whole
    return None


def _others(outputs: list[Term], bindings: Bindings) -> Iterator[Bindings]:
    """Yield the ways to match the other results of a pattern."""
    if not outputs:
        yield bindings
        return
    *rest, term = outputs
    candidates = [bindings[term]] if term in bindings else _candidates(term, bindings)
    for node in candidates:
        for more in _terms(term, node, bindings):
            yield from _others(rest, more)


def _candidates(term: Term, bindings: Bindings) -> list[Node]:
    """Return calls of the term's operator that read, over at most eight calls, a node of the match."""
    targets = term.targets if isinstance(term, Call) else ()
    seen: dict[Node, None] = {}
    front = [n for n in bindings.values() if isinstance(n, Node)]
    for _ in range(8):
        front = list(dict.fromkeys(u for n in front for u in n.users if u not in seen))
        seen.update(dict.fromkeys(front))
    return [n for n in seen if n.target in targets]


def _closed(outputs: Sequence[Term], bindings: Bindings) -> Match | None:
    """Return the match, unless a call inside it has users outside it."""
    calls = {t: n for t, n in bindings.items() if isinstance(t, Call)}
    nodes = dict.fromkeys(calls.values())
    if len(nodes) != len(calls):
        return None  # two calls of the pattern are one call of the graph
    for term, node in calls.items():
        if term not in outputs and not term.shared and any(u not in nodes for u in node.users):
            return None
    kwargs = {t.name: n for t, n in bindings.items() if isinstance(t, Arg)}
    return Match(kwargs, tuple(bindings[t] for t in outputs), tuple(nodes))


def _terms(term: object, value: object, bindings: Bindings) -> Iterator[Bindings]:
    """Yield the ways to match a term or constant with an argument."""
    if isinstance(term, (Arg, Call)) and term in bindings:
        if bindings[term] is value or (not isinstance(value, Node) and equal(bindings[term], value)):
            yield bindings
        return
    match term:
        case Arg():
            if isinstance(value, (Node, *_NUMBERS)):
                yield {**bindings, term: value}
        case Anything():
            yield bindings
        case Like(kind):
            if kind_of(value) == kind:
                yield bindings
        case OneOf(options):
            for option in options:
                yield from _terms(option, value, bindings)
        case Call():
            if isinstance(value, Node) and value.op == "call_function" and value.target in term.targets:
                yield from _call(term, value, bindings)
        case list() | tuple():
            if isinstance(value, (list, tuple)) and len(term) == len(value):
                yield from _each(term, value, bindings)
        case _:
            if equal(term, value):
                yield bindings


def _call(term: Call, node: Node, bindings: Bindings) -> Iterator[Bindings]:
    expected = arguments(node.target, term.args, dict(term.kwargs))
    actual = arguments(node.target, node.args, node.kwargs)
    if expected is None or actual is None or len(expected) != len(actual):
        return
    for more in _each(expected, actual, bindings):
        yield {**more, term: node}
    if term.commutes:
        swapped = (expected[1], expected[0], *expected[2:])
        for more in _each(swapped, actual, bindings):
            yield {**more, term: node}


def _each(terms: Sequence[object], values: Sequence[object], bindings: Bindings) -> Iterator[Bindings]:
    if not terms:
        yield bindings
        return
    for more in _terms(terms[0], values[0], bindings):
        yield from _each(terms[1:], values[1:], more)


def arguments(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...] | None:
    """Return all arguments of a call by position, with the schema's defaults; None if one is missing."""
    schema = _schema(target)
    if schema is None:
        return (*args, *(value for _, value in sorted(kwargs.items())))
    out = list(args)
    for name, has_default, default in schema[len(args) :]:
        if name in kwargs:
            out.append(kwargs[name])
        elif has_default:
            out.append(default)
        else:
            return None
    return tuple(out)


@functools.cache
def _schema(target: object) -> tuple[tuple[str, bool, object], ...] | None:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    optional = torch.OptionalType
    return tuple(
        (a.name, a.has_default_value() or isinstance(a.type, optional), a.default_value) for a in schema.arguments
    )


def equal(a: object, b: object) -> bool:
    """Return whether two constants are equal for all values of their symbols. 1 and 1.0 are equal, 1 and True not."""
    x, y = val(a), val(b)
    if isinstance(x, (torch.SymInt, torch.SymFloat)) or isinstance(y, (torch.SymInt, torch.SymFloat)):
        return isinstance(x, _NUMBERS) and isinstance(y, _NUMBERS) and statically_known_true(x == y)
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return a is b
    return bool(x == y) and isinstance(x, bool) == isinstance(y, bool)


def kind_of(value: object) -> str:
    """Return the kind of a constant that depends on shapes, dtypes or devices; "" for others."""
    if isinstance(value, Node):
        return "int" if isinstance(val(value), (int, torch.SymInt)) else ""
    if isinstance(value, (list, tuple)):
        return "sizes" if all(kind_of(item) == "int" for item in value) else ""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return "int"
    kinds = {torch.dtype: "dtype", torch.device: "device", torch.memory_format: "format", torch.layout: "format"}
    return kinds.get(type(value), "")
