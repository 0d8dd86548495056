"""Symbols that a call's results give: how the host program finds them, and what has to hold of them then.

Tracing concludes from checks what later code counts on: a range, an equality, a divisibility. The host program
verifies all of it in the step that gives the symbol, so that nothing that counts on it has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from ..compat import torch_api
from ..debug.trace import DecisionKind
from ..errors import Unsupported
from .context import Ctx
from .facts import user_line
from .python_text import python_text

Requirement = tuple[str, str]  # condition, message
_ASSERT_SCALAR = torch.ops.aten._assert_scalar.default


@dataclass
class Given:
    """Symbols that one call gives: those of its numbers by position among the results, and the rest with its text."""

    ctx: Ctx
    node: torch.fx.Node
    numbers: dict[int, str] = field(default_factory=dict)
    sizes: list[tuple[sympy.Symbol, int, str]] = field(default_factory=list)
    symbols: list[tuple[sympy.Symbol, str]] = field(default_factory=list)  # with their names
    binds: list[tuple[str, str]] = field(default_factory=list)
    requires: list[Requirement] = field(default_factory=list)

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.numbers.values(), *(name for name, _ in self.binds)]))

    def bind(self, outs: Sequence[str | None]) -> None:
        """Name the sizes, now that the results have names, and collect what must hold."""
        for symbol, position, form in self.sizes:
            name = _fresh(self.ctx, symbol, self.node)
            self.symbols.append((symbol, name))
            self.binds.append((name, form.format(outs[position])))
            self.ctx.known.add(name)
        for symbol, name in self.symbols:
            self._require(symbol, name)

    def _require(self, symbol: sympy.Symbol, name: str) -> None:
        ctx, env = self.ctx, torch_api.shape_env_of(self.node)
        facts = torch_api.unbacked_facts(env, symbol)
        if name != str(symbol):
            self._add(f"{name} == {symbol}", sympy.Eq(symbol, sympy.Symbol(name), evaluate=False))
        self._require_range(symbol, name, facts)
        if facts.equals != symbol:
            if facts.equals.is_Symbol and str(facts.equals) not in ctx.known:
                self.binds.append((str(facts.equals), name))
                ctx.known.add(str(facts.equals))
            else:
                ctx.pending.append(sympy.Eq(symbol, facts.equals, evaluate=False))
        ctx.pending += [c for c in facts.conditions if c not in ctx.pending]
        self._flush()

    def _require_range(self, symbol: sympy.Symbol, name: str, facts: torch_api.UnbackedFacts) -> None:
        least, greatest = facts.least, facts.greatest
        if least is not None and least == greatest:
            self.ctx.verified |= {_canonical(r(symbol, least, evaluate=False)) for r in (sympy.Ge, sympy.Le)}
            self._add(f"{name} == {least}", sympy.Eq(symbol, least, evaluate=False))
            return
        if least is not None and (least > 0 or name in self.numbers.values()):  # no size is below zero
            self._add(f"{name} >= {least}", sympy.Ge(symbol, least, evaluate=False))
        if greatest is not None:
            self._add(f"{name} <= {greatest}", sympy.Le(symbol, greatest, evaluate=False))

    def _flush(self) -> None:
        """Require what waited for symbols that are known now."""
        for condition in list(self.ctx.pending):
            if not {str(s) for s in condition.free_symbols} - self.ctx.known:
                self.ctx.pending.remove(condition)
                try:
                    self._add(python_text(condition), condition)
                except Unsupported as cause:
                    self.ctx.decision(DecisionKind.CHECKS, self.node.name, "not verified", str(cause))

    def _add(self, text: str, condition: sympy.Basic) -> None:
        if _canonical(condition) not in self.ctx.verified:
            self.ctx.verified.add(_canonical(condition))
            self.requires.append((text, _message(self.node, condition)))


def given(ctx: Ctx, node: torch.fx.Node) -> Given:
    """The symbols that a node's call gives, those of its numbers named. Raises Unsupported for another form of path."""
    out = Given(ctx, node)
    for symbol, path in torch_api.defined_symbols(node).items():
        position, rest = _leaf(node.meta["val"], torch_api.path_steps(path))
        if not rest:
            name = _fresh(ctx, symbol, node)
            out.numbers[position] = name
            out.symbols.append((symbol, name))
            ctx.known.add(name)
        else:
            out.sizes.append((symbol, position, _form(node, rest)))
    return out


def _fresh(ctx: Ctx, symbol: sympy.Symbol, node: torch.fx.Node) -> str:
    """The symbol's own name, or another where an earlier call has given the symbol already."""
    return str(symbol) if str(symbol) not in ctx.known else f"{symbol}_{node.name}"


def _leaf(val: Any, steps: list[tuple[str, Any]]) -> tuple[int, list[tuple[str, Any]]]:
    """(position of a result in the flat order, the steps within it)."""
    position = 0
    while isinstance(val, (tuple, list)):
        (_, k), *steps = steps
        position += sum(len(torch.utils._pytree.tree_leaves(x, is_leaf=_is_nothing)) for x in val[:k])
        val = val[k]
    return position, steps


def _is_nothing(x: Any) -> bool:
    return x is None


def _form(node: torch.fx.Node, steps: list[tuple[str, Any]]) -> str:
    """Python text of what the steps lead to, with a hole for the result."""
    text, waiting = "{}", list(steps)
    while waiting:
        match waiting.pop(0):
            case ("size" | "stride" as method, _) if waiting and waiting[0][0] == "item":
                text += f".{method}({waiting.pop(0)[1]})"
            case ("storage_offset", _):
                text += ".storage_offset()"
            case ("//", divisor):
                text += f" // {divisor}"
            case ("int", _):
                text = f"int({text})"
            case other:
                raise Unsupported(node, f"a size that data decides, found by {other[0]}")
    return text


def _message(node: torch.fx.Node, condition: sympy.Basic) -> str:
    """What the program's own check of a condition says, else the condition and where the number is from."""
    wanted = _canonical(condition)
    for n in node.graph.find_nodes(op="call_function", target=_ASSERT_SCALAR):
        held = n.args[0].meta.get("val") if isinstance(n.args[0], torch.fx.Node) else None
        if isinstance(held, torch.SymBool) and _canonical(held.node._expr) == wanted and len(n.args) > 1:
            return str(n.args[1])
    place = user_line(node)
    return f"Runtime assertion failed for expression {condition} on {node.name}" + (f" ({place})" if place else "")


def _canonical(e: sympy.Basic) -> str:
    return str(getattr(e, "canonical", e))


def is_verified(ctx: Ctx, condition: Any) -> bool:
    """Whether the host program has required a condition, given as the graph has it, before this point."""
    held = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
    return isinstance(held, torch.SymBool) and _canonical(held.node._expr) in ctx.verified
