"""The rule that replaces what a search function computes by what a replacement function computes.

Two conditions decide whether a match of the pattern is accepted. The search function, traced with the shapes, dtypes
and strides of the match, gives exactly the calls of the graph. Every result of the replacement has the dtype and shape
of the old one. Strides are restored by a copy where they differ.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ...aten.mutates import writes
from ...compat import torch_api
from ..cse import feeds_output
from ..graph import ancestors, val
from ..simplify import same_sizes
from . import match as matching
from .match import Match
from .rules import Rewrite, described
from .splice import Splice, restorable, restored
from .terms import Call, roots
from .trace import Traced, TraceFn, results_of, terms_of, values_of

Check = Callable[[Match], object]


@dataclass(frozen=True)
class Replacement:
    """A rule: calls that equal `search` become those of `replace`, both traced by `trace`.

    `pattern`: the search function as terms. `check`: a further condition. `exclusive`: names of arguments that only
    the match may use. `scalars`: numbers that stand for arguments in the pattern.
    """

    name: str
    search: Callable[..., object]
    replace: Callable[..., object]
    trace: TraceFn
    pattern: Traced
    check: Check = lambda match: True
    exclusive: Collection[str] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    first: Check = lambda match: True  # a cheap condition on the structure's match, before the search is traced
    traces: dict[Hashable, GraphModule] = field(default_factory=dict, compare=False)  # of one application, by geometry
    strict: dict[GraphModule, Traced] = field(default_factory=dict, compare=False)  # traces as terms

    @property
    def targets(self) -> tuple[object, ...]:
        """Return the operators at which the rule can start."""
        return roots(self.pattern.outputs[-1])

    @property
    def inner(self) -> tuple[object, ...]:
        """Return the operators of the first argument that the rule needs."""
        return first_operators(self.pattern.outputs[-1])

    def version(self) -> str | None:
        """Return the name and the code of the rule's functions, for the cache key; None if one has no version."""
        texts = [source_of(fn) for fn in (self.search, self.replace, self.check, self.trace)]
        if None in texts:
            return None
        return f"{self.name} {texts} {self.exclusive} {dict(self.scalars)} {self.pattern.names}"

    def rewrite(self, n: Node) -> Rewrite | None:
        """Replace the match that ends at a node, if there is one and it is accepted."""
        match = self.accepted(n)
        if match is None:
            return None
        new = insert(match, self._replaced(match), self.pattern.positions)
        if new is None:
            return None
        return Rewrite(self.name, tuple(map(described, match.nodes)), tuple(map(described, new)), len(new) > 1)

    def accepted(self, n: Node) -> Match | None:
        """Return the match that ends at a node, if the graph has exactly the calls of the search function."""
        match = self._found(n)
        if match is None or not self.first(match):
            return None
        if not self._only_users(match) or any(writes(m) for m in match.nodes):
            return None
        traced = self._traced(self.search, match)
        if traced is None:
            return None
        if traced not in self.strict:
            self.strict[traced] = terms_of(traced, self.pattern.names[: self._count()], {}, loose=False)
        exact = matching.match(self.strict[traced].outputs, n)
        if exact is None or any(
            exact.kwargs.get(k, v) is not v for k, v in match.kwargs.items() if isinstance(v, Node)
        ):
            return None
        return match if self.check(match) else None

    def _found(self, n: Node) -> Match | None:
        """Return the match of the pattern's structure that ends at a node, with its arguments in order."""
        match = matching.match(self.pattern.outputs, n)
        if match is None:
            return None
        return replace(match, kwargs={name: match.kwargs.get(name) for name in self.pattern.names})

    def _only_users(self, match: Match) -> bool:
        arguments = [match.kwargs[name] for name in self.exclusive]
        return all(u in match.nodes for n in arguments if isinstance(n, Node) for u in n.users)

    def _count(self) -> int:
        return sum(1 for name in self.pattern.names if not name.startswith("tangent_"))

    def _replaced(self, match: Match) -> GraphModule:
        try:
            return self._trace(self.replace, match)
        except Exception as cause:
            todo = "correct the function, or refuse the match in extra_check"
            raise RuntimeError(f"the replacement of the rule {self.name} failed: {cause}; {todo}") from cause

    def _traced(self, fn: Callable[..., object], match: Match) -> GraphModule | None:
        """Trace a function with the values of a match; None if it does not take them."""
        try:
            return self._trace(fn, match)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # shapes that the function refuses
            return None

    def _trace(self, fn: Callable[..., object], match: Match) -> GraphModule:
        named = {name: match.kwargs[name] for name in self.pattern.names[: self._count()]}
        values = values_of(named, self.pattern.with_gradients)
        key = (fn, *map(geometry, values))
        if None in key:
            return self.trace(fn, values)
        if key not in self.traces:
            self.traces[key] = self.trace(fn, values)
        return self.traces[key]

    def forget(self) -> None:
        """Drop the traces of an application, which hold the values of its graph."""
        self.traces.clear()
        self.strict.clear()


def geometry(value: object) -> Hashable:
    """Return what a trace depends on: sizes, strides, dtype and device, or a number; None if a size is symbolic."""
    if not isinstance(value, torch.Tensor):
        return (type(value), value) if isinstance(value, (bool, int, float)) else None
    numbers = (*value.shape, *value.stride())
    if value.layout != torch.strided or not all(isinstance(n, int) for n in numbers):
        return None
    return numbers, value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()


def first_operators(term: Call) -> tuple[object, ...]:
    """Return the operators that the first argument of a call must have; () if it may be anything."""
    first = term.args[0] if term.args else None
    return () if term.commutes or not isinstance(first, Call) else first.targets


def source_of(fn: Callable[..., object]) -> str | None:
    """Return a digest of the file of a function, of its name and of the values that it closes over.

    Return None if the file cannot be read, or if a value has no text that tells its content.
    """
    code = getattr(fn, "__code__", None)
    try:
        text = Path(inspect.getsourcefile(fn) or "").read_bytes()
    except (OSError, TypeError):
        return None
    closed = [_text(cell.cell_contents) for cell in getattr(fn, "__closure__", None) or ()]
    if code is None or None in closed:
        return None
    return hashlib.sha256(text + f"{fn.__qualname__} {code.co_firstlineno} {closed}".encode()).hexdigest()[:16]


def _text(value: object) -> str | None:
    """Return a text of a value that tells its content, or None."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        texts = [_text(item) for item in value]
        return None if None in texts else repr(texts)
    return source_of(value) if callable(value) else None


def insert(match: Match, traced: GraphModule, positions: Sequence[int]) -> list[Node] | None:
    """Insert a traced replacement and replace the match by it; None, with the graph unchanged, if it does not fit."""
    results = results_of(traced.graph)
    chosen = [results[k] for k in positions] if len(results) > max(positions) else []
    if not chosen or not all(_fits(old, new) for old, new in zip(match.outputs, chosen, strict=True)):
        return None
    if _returns_argument(match, traced, chosen) or _cyclic(match, traced, chosen):
        return None
    splice = Splice.of(match, traced)
    if splice is None:
        return None
    with match.outputs[0].graph.inserting_before(max(match.outputs)):
        copies = splice.copy()
        if copies is None:
            return None
        new = [restored(copies[result], val(old)) for old, result in zip(match.outputs, chosen, strict=True)]
    inserted = set(copies.values())
    for old, node in zip(match.outputs, new, strict=True):
        node.meta.update({k: v for k, v in old.meta.items() if k not in ("val", "tensor_meta")})
        old.replace_all_uses_with(node, delete_user_cb=lambda user: user not in inserted)
    _erase(match)
    return new


def _erase(match: Match) -> None:
    graph = match.outputs[0].graph
    remaining = sorted(match.nodes, reverse=True)
    for n in remaining:
        if not n.users:
            graph.erase_node(n)


def _fits(old: Node, new: object) -> bool:
    """Return whether a result has the dtype, shape and device of the one that it replaces."""
    a, b = val(old), val(new)
    if not isinstance(new, Node) or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    same = a.dtype == b.dtype and a.device == b.device and same_sizes(a.shape, b.shape)
    return same and (same_sizes(a.stride(), b.stride()) or restorable(a))


def _returns_argument(match: Match, traced: GraphModule, results: Sequence[Node]) -> bool:
    """Return whether a result would share memory with an argument, or with another result, as the old one did not."""
    arguments = {torch_api.storage_of(val(n)) for n in traced.graph.find_nodes(op="placeholder")}
    storages = [torch_api.storage_of(val(n)) for n in results]
    aliased = [s in arguments or storages.count(s) > 1 for s in storages]
    return any(alias and feeds_output(old) for alias, old in zip(aliased, match.outputs, strict=True))


def _cyclic(match: Match, traced: GraphModule, results: Sequence[Node]) -> bool:
    """Return whether a new result would depend on a user of the result that it replaces."""
    if len(results) == 1:
        return False
    inputs = traced.graph.find_nodes(op="placeholder")
    given = Splice.given(match, inputs)
    for old, result in zip(match.outputs, results, strict=True):
        needed = {given[n] for n in ancestors(result) if n in given and isinstance(given[n], Node)}
        if any(old in ancestors(n) for n in needed):
            return True
    return False
