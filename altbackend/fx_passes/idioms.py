"""Peephole rules for graphs of Python functions and of ATen operators: queries, lists, dictionaries, views and copies.

An idiom gives the value that a call equals: a node, or a constant that its users then hold. Where a call returns
memory of its own and the value does not, alias analysis must show that nobody can tell the difference.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from . import idiom_values as values
from .aliases import Aliases
from .attention.operators import value_of
from .pattern.rules import Rewrite, Rules, described
from .simplify import RULES, same_layout

aten = torch.ops.aten


def _inputs() -> tuple[object, ...]:
    return (torch.randn(4, 6),)


@dataclass(frozen=True)
class Idiom:
    """A rule. `value` returns what a call equals, or NOTHING.

    `fresh`: the call has memory of its own. `kind`: "shape" for queries of sizes, "addmm" for fused products, which
    callers switch. `example`: a function in which the rule applies, and `inputs` for it, which the tests run.
    """

    name: str
    targets: tuple[object, ...]
    value: Callable[[Node], object]
    example: Callable[..., object]
    inputs: Callable[[], tuple[object, ...]] = field(default=_inputs)
    fresh: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Bound:
    """An idiom with the aliases of a graph, as the engine takes it."""

    idiom: Idiom
    aliases: Aliases
    inner: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the idiom."""
        return self.idiom.name

    @property
    def targets(self) -> tuple[object, ...]:
        """Return the targets of the idiom."""
        return self.idiom.targets

    def rewrite(self, n: Node) -> Rewrite | None:
        """Replace a call by the value that it equals, if that is safe; return None if not."""
        value = self.idiom.value(n)
        if value is values.NOTHING or value is n:
            return None
        if self.idiom.fresh and not (isinstance(value, Node) and self.aliases.may_become(n, value)):
            return None
        before = described(n)
        substitute(n, value)
        n.graph.erase_node(n)
        return Rewrite(self.name, (before,), (described(value),))


def substitute(n: Node, value: object) -> None:
    """Replace a node by another one, or by a constant or a list of nodes, in all its users."""
    if isinstance(value, Node):
        n.replace_all_uses_with(value)
        return

    def replaced(x: Any) -> Any:
        return value if x is n else x

    for user in list(n.users):
        user.args = map_aggregate(user.args, replaced)
        user.kwargs = map_aggregate(user.kwargs, replaced)


def rules(aliases: Aliases, *, addmm: bool = False, shapes: bool = True) -> Rules:
    """Return the rules as a set for one graph: the idioms, and the compiler's own rules for no-ops."""
    chosen = [i for i in IDIOMS if (i.kind != "addmm" or addmm) and (i.kind != "shape" or shapes)]
    no_ops = [Idiom(r.name, r.targets, _no_op(r.applies), r.example, fresh=True) for r in RULES]
    return Rules([Bound(idiom, aliases) for idiom in (*chosen, *no_ops)], "idioms", last_first=False)


def _no_op(applies: Callable[[Node], object]) -> Callable[[Node], object]:
    """Return the value of a rule of the compiler, which needs traced values of equal layout."""

    def value(n: Node) -> object:
        if not isinstance(value_of(n), torch.Tensor) or "val" not in n.meta:
            return values.NOTHING
        source = applies(n)
        return source if isinstance(source, Node) and same_layout(value_of(n), value_of(source)) else values.NOTHING

    return value


_TO = (
    "to",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "contiguous",
    "expand",
    aten.to.dtype,
    aten.contiguous.default,
)
_CATS = (torch.cat, aten.cat.default)


def _linear_inputs() -> tuple[object, ...]:
    return torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)


def emit(x: object, target: Callable[..., Any] | str, *args: Any) -> Any:
    """Call a function, or a method by its name; if `x` is traced, as a node also where Python would not make one."""
    if isinstance(x, torch.fx.Proxy):
        return x.tracer.create_proxy("call_method" if isinstance(target, str) else "call_function", target, args, {})
    return getattr(args[0], target)(*args[1:]) if isinstance(target, str) else target(*args)


IDIOMS: tuple[Idiom, ...] = (
    Idiom("len([a, b]) -> 2", (builtins.len,), values.length, lambda x: x * emit(x, len, [x, x])),
    Idiom(
        "[a, b][0] -> a", (operator.getitem,), values.element, lambda x: emit(x, operator.getitem, [x.sin(), x], 0) + 1
    ),
    Idiom(
        "[a] + [b] -> [a, b]", (operator.add,), values.joined, lambda x: torch.cat(emit(x, operator.add, [x], [x]), 0)
    ),
    Idiom(
        "list([a, b]) -> [a, b]",
        (builtins.list, builtins.tuple),
        values.copied,
        lambda x: torch.cat(emit(x, list, (x, x)), 0),
    ),
    Idiom("{k: a}.get(k) -> a", ("get",), values.looked_up, lambda x: emit(x, "get", {"k": x}, "k") + 1),
    Idiom(
        "{k: a}.values() -> [a]",
        ("keys", "values", "items"),
        values.listed,
        lambda x: torch.cat(emit(x, list, emit(x, "values", {"k": x})), 0),
    ),
    Idiom(
        "k in {k: a} -> True",
        (operator.contains,),
        values.contained,
        lambda x: x * emit(x, operator.contains, {"k": x}, "k"),
    ),
    Idiom("x.size(0) -> 4", ("size", aten.sym_size.int), values.size, lambda x: x.reshape(x.size(0) * 6), kind="shape"),
    Idiom(
        "x.shape -> [4, 6]",
        (builtins.getattr,),
        values.shape_attribute,
        lambda x: x.reshape(emit(x, operator.getitem, emit(x, getattr, x, "shape"), 1), -1),
        kind="shape",
    ),
    Idiom(
        "x.numel() -> 24",
        ("numel", "nelement", aten.sym_numel.default, torch.numel),
        values.of_tensor(lambda x: values.static(x.numel())),
        lambda x: x.reshape(x.numel()),
        kind="shape",
    ),
    Idiom(
        "x.dim() -> 2",
        ("dim", "ndimension"),
        values.of_tensor(lambda x: x.dim()),
        lambda x: x.sum(x.dim() - 1),
        kind="shape",
    ),
    Idiom(
        "x.dtype -> float32", (builtins.getattr,), values.attribute, lambda x: x.to(emit(x, getattr, x, "dtype")) + 1
    ),
    Idiom(
        "x.is_floating_point() -> True",
        ("is_floating_point", torch.is_floating_point),
        values.of_tensor(lambda x: x.is_floating_point()),
        lambda x: x * x.is_floating_point(),
    ),
    Idiom(
        "x.is_complex() -> False",
        ("is_complex", torch.is_complex),
        values.of_tensor(lambda x: x.is_complex()),
        lambda x: x + x.is_complex(),
    ),
    Idiom(
        "x is None -> False",
        (operator.is_, operator.is_not),
        values.is_none,
        lambda x: x * emit(x, operator.is_not, x, None),
    ),
    Idiom("x.to(x.dtype) -> x", _TO, values.itself, lambda x: x.to(torch.float32).exp()),
    Idiom(
        "dropout(x, training=False) -> x",
        (F.dropout, torch.dropout, aten.dropout.default),
        values.not_dropped,
        lambda x: F.dropout(x, 0.5, training=False).exp(),
    ),
    Idiom(
        "x.t().t() -> x",
        ("t", "transpose", torch.t, torch.transpose, aten.t.default, aten.transpose.int),
        values.turned_back,
        lambda x: x.transpose(0, 1).transpose(1, 0).exp(),
    ),
    Idiom(
        "x permuted there and back -> x",
        ("permute", torch.permute, aten.permute.default),
        values.permuted_back,
        lambda x: x.permute(1, 0).permute(1, 0).exp(),
    ),
    Idiom(
        "x.unsqueeze(0).squeeze(0) -> x",
        ("squeeze", torch.squeeze, aten.squeeze.dim),
        values.squeezed,
        lambda x: x.unsqueeze(1).squeeze(1).exp(),
    ),
    Idiom(
        "view of a view -> view",
        ("view", "reshape", torch.reshape, aten.view.default, aten.reshape.default),
        values.one_view,
        lambda x: x.view(2, 12).view(24).exp(),
    ),
    Idiom(
        "cat([cat([a, b]), c]) -> cat([a, b, c])",
        _CATS,
        values.whole_cat,
        lambda x: torch.cat([torch.cat([x, x + 1], 1), x], 1).exp(),
    ),
    Idiom(
        "mm(a, b) + c -> addmm(c, a, b)",
        (operator.add, torch.add, "add", aten.add.Tensor),
        values.addmm,
        lambda x, w, b: (torch.mm(x, w) + b).exp(),
        _linear_inputs,
        kind="addmm",
    ),
)


def apply(graph: Graph, *, addmm: bool = False, shapes: bool = True) -> list[Rewrite]:
    """Apply all rules once at every node; return what they did."""
    with torch_api.real_tensors():
        return rules(Aliases(graph), addmm=addmm, shapes=shapes).apply(graph)
