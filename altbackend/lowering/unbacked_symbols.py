"""Unbacked symbols, which the results of calls give: their Python text in the host program, and the checks of them.

From checks in the user's program, tracing derives facts on which later code relies: a range, an equality, a
divisibility. The host program checks them in the step that gives the symbol, before any such code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..debug.trace import DecisionKind
from ..errors import Unsupported
from ..ir import expr as ex
from . import sizes
from .context import Ctx
from .facts import user_line
from .python_text import python_text

Requirement = tuple[str, str]  # condition, message
_ASSERT_SCALAR = torch.ops.aten._assert_scalar.default


@dataclass
class CallSymbols:
    """The unbacked symbols that one call gives.

    `numbers`: the symbols that are results themselves, by position. `sizes`: (symbol, position of a result, Python text
    with `{}` for the result). `symbols`: all, with their names in the host program. `binds` and `requires`: see Extern.
    """

    ctx: Ctx
    node: torch.fx.Node
    numbers: dict[int, str] = field(default_factory=dict)
    sizes: list[tuple[sympy.Symbol, int, str]] = field(default_factory=list)
    symbols: list[tuple[sympy.Symbol, str]] = field(default_factory=list)
    binds: list[tuple[str, str]] = field(default_factory=list)
    requires: list[Requirement] = field(default_factory=list)

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.numbers.values(), *(name for name, _ in self.binds)]))

    def bind(self, outs: Sequence[str | None]) -> None:
        """Name the sizes, now that the results have names, and collect the checks of all symbols."""
        for symbol, position, form in self.sizes:
            name = _fresh(self.ctx, symbol, self.node)
            self.symbols.append((symbol, name))
            self.binds.append((name, form.format(outs[position])))
            self.ctx.defined.add(name)
        for symbol, name in self.symbols:
            self._require(symbol, name)

    def _require(self, symbol: sympy.Symbol, name: str) -> None:
        ctx, env = self.ctx, torch_api.shape_env_of(self.node)
        facts = torch_api.unbacked_facts(env, symbol)
        if name != str(symbol):
            self._add(f"{name} == {symbol}", sympy.Eq(symbol, sympy.Symbol(name), evaluate=False))
        self._require_range(symbol, name, facts)
        if facts.equals != symbol:
            if facts.equals.is_Symbol and str(facts.equals) not in ctx.defined:
                self.binds.append((str(facts.equals), name))
                ctx.defined.add(str(facts.equals))
            elif not self._without_input(facts.equals):
                ctx.pending.append(sympy.Eq(symbol, facts.equals, evaluate=False))
        ctx.pending += [c for c in facts.conditions if c not in ctx.pending]
        self._flush()

    def _without_input(self, e: sympy.Expr) -> set[sympy.Symbol]:
        """Return the symbols of an expression that no input and no call of this graph gives.

        Dynamo makes a symbol of a number in the user's program, and drops the input if only a check reads it.
        """
        undefined = {s for s in e.free_symbols if str(s) not in self.ctx.defined}
        return {s for s in undefined if not symbol_is_type(s, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))}

    def stand_in(self, symbol: sympy.Symbol, name: str) -> None:
        """Let a number of the call be the value of the expression with which tracing has replaced its symbol.

        That is needed where no input gives a symbol of the expression e; nothing can then check the equality. Other
        values of the graph were derived from the number alone, so that any solution of e = number gives them: in
        e = c * s + rest, the other symbols without an input keep the values of tracing. Tracing has decided conditions
        on e, and the graph relies on them: the number is checked for them.
        """
        env = torch_api.shape_env_of(self.node)
        e = torch_api.unbacked_facts(env, symbol).equals
        unknown = sorted(self._without_input(e), key=str)
        if env is None or e.is_Symbol or not unknown:
            return
        memo, number = self.ctx.shape_memo, ex.sym(name, *sizes.bounds(e, env))
        memo[e] = number
        self.ctx.decision(DecisionKind.CHECKS, self.node.name, "not verified", f"{symbol} == {e}: no input gives {e}")
        c = e.coeff(unknown[0])
        rest = sympy.expand(e - c * unknown[0])
        decided = {e: symbol}
        if c.is_Integer and c != 0 and unknown[0] not in rest.free_symbols:
            memo.update({s: torch_api.traced_value(env, s) for s in unknown[1:]})
            multiple = ex.add(number, ex.mul(-1, sizes.of_expression(rest, env, memo)))
            memo[unknown[0]] = ex.floordiv(ex.mul(int(sympy.sign(c)), multiple), abs(int(c)))
            if abs(c) != 1:
                message = _message(self.node, sympy.Eq(symbol, e, evaluate=False))
                self.requires.append((f"({ex.show(multiple)}) % {abs(int(c))} == 0", message))
            decided[unknown[0]] = FloorDiv((symbol - rest) * sympy.sign(c), abs(c))
        conditions = (g.xreplace(decided) for g in torch_api.size_conditions(env) if g.free_symbols & set(unknown))
        self.ctx.pending += [g for g in conditions if not g.free_symbols & set(unknown) and g not in self.ctx.pending]

    def _require_range(self, symbol: sympy.Symbol, name: str, facts: torch_api.UnbackedFacts) -> None:
        least, greatest = facts.least, facts.greatest
        if least is not None and least == greatest:
            self.ctx.verified |= {_canonical(r(symbol, least, evaluate=False)) for r in (sympy.Ge, sympy.Le)}
            self._add(f"{name} == {least}", sympy.Eq(symbol, least, evaluate=False))
            return
        if least is not None and (least > 0 or name in self.numbers.values()):  # sizes are never negative
            self._add(f"{name} >= {least}", sympy.Ge(symbol, least, evaluate=False))
        if greatest is not None:
            self._add(f"{name} <= {greatest}", sympy.Le(symbol, greatest, evaluate=False))

    def _flush(self) -> None:
        """Require the pending conditions all of whose symbols now have values."""
        for condition in list(self.ctx.pending):
            if not {str(s) for s in condition.free_symbols} - self.ctx.defined:
                self.ctx.pending.remove(condition)
                try:
                    self._add(python_text(condition), condition)
                except Unsupported as cause:
                    self.ctx.decision(DecisionKind.CHECKS, self.node.name, "not verified", str(cause))

    def _add(self, text: str, condition: sympy.Basic) -> None:
        if _canonical(condition) not in self.ctx.verified:
            self.ctx.verified.add(_canonical(condition))
            self.requires.append((text, _message(self.node, condition)))


def of_call(ctx: Ctx, node: torch.fx.Node) -> CallSymbols:
    """Return the symbols that the call of a node gives; those that are results are named.

    Raises Unsupported if the host program cannot spell the way from a result to a symbol.
    """
    out = CallSymbols(ctx, node)
    symbols = torch_api.defined_symbols(node)
    if not symbols and (own := own_symbol(ctx, node)) is not None:
        symbols = {own: ()}
    for symbol, path in symbols.items():
        position, rest = _leaf(node.meta["val"], torch_api.path_steps(path))
        if not rest:
            name = _fresh(ctx, symbol, node)
            out.numbers[position] = name
            out.symbols.append((symbol, name))
            ctx.defined.add(name)
            out.stand_in(symbol, name)
        else:
            out.sizes.append((symbol, position, _form(node, rest)))
            out.stand_in(symbol, _fresh(ctx, symbol, node))
    return out


def own_symbol(ctx: Ctx, node: torch.fx.Node) -> sympy.Symbol | None:
    """Return the unbacked symbol that an integer result is, if nothing has defined it yet, else None.

    Tracing records no binding for the offset of a view that begins where data decides.
    """
    fake = node.meta.get("val")
    e = fake.node.expr if isinstance(fake, torch.SymInt) else None
    if e is None or not e.is_Symbol or not symbol_is_type(e, SymT.UNBACKED_INT) or str(e) in ctx.defined:
        return None
    return e if any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes) else None


def _fresh(ctx: Ctx, symbol: sympy.Symbol, node: torch.fx.Node) -> str:
    """Return the symbol's own name, or another one if an earlier call has defined the symbol already."""
    return str(symbol) if str(symbol) not in ctx.defined else f"{symbol}_{node.name}"


Steps = list[tuple[str, "int | str"]]  # from the result of a call to a symbol in it


def _leaf(val: object, steps: Steps) -> tuple[int, Steps]:
    """Return (position of a result in the flat order, the steps within it)."""
    position = 0
    while isinstance(val, (tuple, list)):
        (_, k), *steps = steps
        assert isinstance(k, int)
        position += sum(len(torch.utils._pytree.tree_leaves(x, is_leaf=_is_nothing)) for x in val[:k])
        val = val[k]
    return position, steps


def _is_nothing(x: object) -> bool:
    return x is None


def _form(node: torch.fx.Node, steps: Steps) -> str:
    """Return Python text of the steps from a result to a symbol, with `{}` for the result."""
    text, remaining = "{}", list(steps)
    while remaining:
        match remaining.pop(0):
            case ("size" | "stride" as method, _) if remaining and remaining[0][0] == "item":
                text += f".{method}({remaining.pop(0)[1]})"
            case ("storage_offset", _):
                text += ".storage_offset()"
            case ("//", divisor):
                text += f" // {divisor}"
            case ("int", _):
                text = f"int({text})"
            case other:
                raise Unsupported(node, f"an unbacked size that is obtained by {other[0]}")
    return text


def _message(node: torch.fx.Node, condition: sympy.Basic) -> str:
    """Return the message of the program's own check of a condition, else the condition and the user's line."""
    text = _canonical(condition)
    for n in node.graph.find_nodes(op="call_function", target=_ASSERT_SCALAR):
        fake = n.args[0].meta.get("val") if isinstance(n.args[0], torch.fx.Node) else None
        if isinstance(fake, torch.SymBool) and _canonical(fake.node._expr) == text and len(n.args) > 1:
            return str(n.args[1])
    line = user_line(node)
    return f"Runtime assertion failed for expression {condition} on {node.name}" + (f" ({line})" if line else "")


def _canonical(e: sympy.Basic) -> str:
    return str(getattr(e, "canonical", e))


def is_verified(ctx: Ctx, condition: object) -> bool:
    """Return whether the host program has already checked a condition, given as an argument of the FX node."""
    fake = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
    return isinstance(fake, torch.SymBool) and _canonical(fake.node._expr) in ctx.verified
