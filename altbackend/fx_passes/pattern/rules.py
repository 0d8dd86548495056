"""Sets of rules, and the loop that applies a set to a graph.

The rules of a node are found by its operator and by the operator of its first argument. A rule is tried at nodes in a
fixed order, rules of one node in the order of registration.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch.fx import Graph, GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from .sort import sort


class Rule(Protocol):
    """The interface that a set of rules requires of a rule.

    `targets`: operators at which the rule can start. `inner`: operators of the first argument that it needs; empty if
    it needs none. `rewrite` changes the graph at a node and returns what it did, or None.
    """

    @property
    def name(self) -> str: ...

    @property
    def targets(self) -> tuple[object, ...]: ...

    @property
    def inner(self) -> tuple[object, ...]: ...

    def rewrite(self, n: Node) -> Rewrite | None: ...


@dataclass(frozen=True)
class Rewrite:
    """The record of one rewrite. `before`: the calls that it matched. `after`: their replacements, or arguments."""

    rule: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    unordered: bool = False  # nodes may stand before their arguments

    def __str__(self) -> str:
        return f"{', '.join(self.before)} -> {', '.join(self.after)}"


def described(n: object) -> str:
    """Return the text of a node in the log: its name and its operator, or the number."""
    if not isinstance(n, Node):
        return repr(n)
    return f"{n.name}: {n.target}" if n.op == "call_function" else n.name


class Rules:
    """A set of rules. It can be given to an option that takes passes of the user.

    `last_first`: start at the last node of a graph, so that large patterns come before the small ones inside them.
    """

    def __init__(self, rules: Iterable[Rule] = (), name: str = "rules", last_first: bool = True) -> None:
        self.name, self.last_first = name, last_first
        self.rules: list[Rule] = []
        self._at: dict[object, dict[object, list[tuple[int, Rule]]]] = {}
        self._inner: dict[object, bool] = {}
        for rule in rules:
            self.add(rule)

    def add(self, rule: Rule) -> None:
        """Add a rule behind the others."""
        number = len(self.rules)
        self.rules.append(rule)
        for target in dict.fromkeys(rule.targets):
            by_inner = self._at.setdefault(target, {})
            for inner in rule.inner or (None,):
                by_inner.setdefault(inner, []).append((number, rule))

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __call__(self, graph: Graph) -> None:
        """Apply the rules to a graph: the form of a pass of the user."""
        self.apply(graph)

    def uuid(self) -> str | None:
        """Return a digest of the rules, which enters the cache key; None if a rule cannot tell its version."""
        texts = [version(rule) for rule in self.rules]
        return None if None in texts else hashlib.sha256(repr(texts).encode()).hexdigest()

    def apply(self, graph: Graph | GraphModule, skip: Callable[[Node], bool] = lambda n: False) -> list[Rewrite]:
        """Apply the rules once at every node, in place; return what they did. `skip`: nodes to leave alone."""
        graph = graph.graph if isinstance(graph, GraphModule) else graph
        done: list[Rewrite] = []
        nodes = list(graph.nodes)
        for n in reversed(nodes) if self.last_first else nodes:
            if n._erased or n.target not in self._at or skip(n):
                continue
            for rule in self._candidates(n):
                rewrite = rule.rewrite(n)
                if rewrite is not None:
                    done.append(rewrite)
                    break
        for rule in self.rules:
            if (forget := getattr(rule, "forget", None)) is not None:
                forget()
        if any(rewrite.unordered for rewrite in done):
            sort(graph)
        return done

    def _candidates(self, n: Node) -> list[Rule]:
        """Return the rules that can start at a node, in the order of registration."""
        by_inner = self._at[n.target]
        first = n.args[0] if n.args else None
        inner = first.target if isinstance(first, Node) and first.op == "call_function" else None
        rules = by_inner.get(None, [])
        if inner is not None and inner in by_inner:
            rules = sorted(rules + by_inner[inner], key=lambda item: item[0])
        return [rule for _, rule in rules]


def version(rule: Rule) -> str | None:
    """Return the text by which a rule tells its version; None if it has none."""
    own = getattr(rule, "version", None)
    text = own() if callable(own) else None
    return None if text is None else str(text)


def counts(rewrites: Iterable[Rewrite]) -> dict[str, int]:
    """Return the number of rewrites by rule."""
    return dict(Counter(rewrite.rule for rewrite in rewrites))
