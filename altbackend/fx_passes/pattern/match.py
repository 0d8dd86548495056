"""Find a term in a graph. The search backtracks over alternatives and exchanged arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph import val
from .terms import Anything, Arg, Call, Like, OneOf, Term

Found = Mapping[Term, Any]  # what each argument and each call of a pattern has matched
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
    for found in _terms(outputs[-1], node, {}):
        for everything in _others(list(outputs[:-1]), found):
            if (whole := _closed(outputs, everything)) is not None:
                return whole
    return None


def _others(outputs: list[Term], found: Found) -> Iterator[Found]:
    """Yield the ways to match the other results of a pattern."""
    if not outputs:
        yield found
        return
    *rest, term = outputs
    candidates = [found[term]] if term in found else _candidates(term, found)
    for node in candidates:
        for more in _terms(term, node, found):
            yield from _others(rest, more)


def _candidates(term: Term, found: Found) -> list[Node]:
    """Return calls of the term's operator that read, over at most eight calls, a node of the match."""
    targets = term.targets if isinstance(term, Call) else ()
    seen: dict[Node, None] = {}
    front = [n for n in found.values() if isinstance(n, Node)]
    for _ in range(8):
        front = list(dict.fromkeys(u for n in front for u in n.users if u not in seen))
        seen.update(dict.fromkeys(front))
    return [n for n in seen if n.target in targets]


def _closed(outputs: Sequence[Term], found: Found) -> Match | None:
    """Return the match, unless a call inside it has users outside it."""
    calls = {t: n for t, n in found.items() if isinstance(t, Call)}
    nodes = dict.fromkeys(calls.values())
    if len(nodes) != len(calls):
        return None  # two calls of the pattern are one call of the graph
    for term, node in calls.items():
        if term not in outputs and not term.shared and any(u not in nodes for u in node.users):
            return None
    kwargs = {t.name: n for t, n in found.items() if isinstance(t, Arg)}
    return Match(kwargs, tuple(found[t] for t in outputs), tuple(nodes))


def _terms(term: object, value: object, found: Found) -> Iterator[Found]:
    """Yield the ways to match a term or constant with an argument."""
    if isinstance(term, (Arg, Call)) and term in found:
        if found[term] is value or (not isinstance(value, Node) and equal(found[term], value)):
            yield found
        return
    match term:
        case Arg():
            if isinstance(value, (Node, *_NUMBERS)):
                yield {**found, term: value}
        case Anything():
            yield found
        case Like(kind):
            if kind_of(value) == kind:
                yield found
        case OneOf(options):
            for option in options:
                yield from _terms(option, value, found)
        case Call():
            if isinstance(value, Node) and value.op == "call_function" and value.target in term.targets:
                yield from _call(term, value, found)
        case list() | tuple():
            if isinstance(value, (list, tuple)) and len(term) == len(value):
                yield from _each(term, value, found)
        case _:
            if equal(term, value):
                yield found


def _call(term: Call, node: Node, found: Found) -> Iterator[Found]:
    expected = arguments(node.target, term.args, dict(term.kwargs))
    actual = arguments(node.target, node.args, node.kwargs)
    if expected is None or actual is None or len(expected) != len(actual):
        return
    for more in _each(expected, actual, found):
        yield {**more, term: node}
    if term.commutes:
        swapped = (expected[1], expected[0], *expected[2:])
        for more in _each(swapped, actual, found):
            yield {**more, term: node}


def _each(terms: Sequence[object], values: Sequence[object], found: Found) -> Iterator[Found]:
    if not terms:
        yield found
        return
    for more in _terms(terms[0], values[0], found):
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
