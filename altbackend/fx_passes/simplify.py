"""Local simplification: common subexpressions, operators without effect, constant folding of uniform tensors.

Every rewrite preserves shape, dtype and strides of the value that it replaces. A value that the graph may return is
not replaced, since a result must not become an alias of another value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ..aten.errors import DIVISIONS, may_raise
from ..aten.mutates import writes
from ..aten.name import operator_name
from ..compat import torch_api
from ..debug.trace import DecisionKind
from . import cse
from .context import Context
from .cse import feeds_output
from .graph import aten, drop_dead, function_of, insert, is_call, val
from .pattern.rules import Rewrite, Rules, counts, described


def run(gm: GraphModule, ctx: Context) -> int:
    """Apply all rules and record the number of rewrites by rule."""
    done: list[Rewrite] = []
    applied = apply_rules(gm, exact=ctx.mode == "eager", done=done)
    log(ctx, applied, done)
    return sum(applied.values())


def run_normalise(gm: GraphModule, ctx: Context) -> int:
    """Bring the graph into the form in which patterns are searched."""
    done = normalise(gm)
    log(ctx, counts(done), done)
    return len(done)


MOST_LOGGED = 5  # rewrites of one rule that the log shows with their nodes


def log(ctx: Context, applied: Mapping[str, int], done: Sequence[Rewrite]) -> None:
    """Record the number of rewrites of each rule, and the nodes before and after the first ones."""
    for rule, count in applied.items():
        texts = [str(rewrite) for rewrite in done if rewrite.rule == rule]
        ctx.trace.decision(DecisionKind.SIMPLIFY, rule, "applied", "; ".join([f"{count} times", *texts[:MOST_LOGGED]]))


def apply_rules(gm: GraphModule, exact: bool = False, done: list[Rewrite] | None = None) -> dict[str, int]:
    """Apply all rules up to a fixed point, at most four rounds; return the number of rewrites by rule.

    `exact`: fold only operators whose result has eager's bits. `done` receives the rewrites of the no-ops.
    """
    total: dict[str, int] = {}
    for _ in range(4):
        merged = cse.eliminate(gm.graph)
        removed = no_ops_of(gm, NO_OPS)
        (done if done is not None else []).extend(removed)
        rewrite_counts = {
            "common subexpressions": merged,
            **counts(removed),
            "cat of cat -> cat": join_cats(gm),
            "uniform values": uniform(gm, exact),
        }
        for k, v in rewrite_counts.items():
            total[k] = total.get(k, 0) + v
        if not any(rewrite_counts.values()):
            break
        drop_dead(gm.graph)
    return {k: v for k, v in total.items() if v}


def same_sizes(a: Sequence[object], b: Sequence[object]) -> bool:
    """Return whether sizes or strides are equal for all values of their symbols; `==` would add a guard."""
    return len(a) == len(b) and all(
        x == y if type(x) is type(y) is int else statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def same_layout(a: object, b: object) -> bool:
    """Return whether two fake values are tensors of equal dtype, sizes and strides on the same device."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.device != b.device:
        return False
    return a.dtype == b.dtype and same_sizes(a.shape, b.shape) and same_sizes(a.stride(), b.stride())


Example = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """A rule for a no-op: `name` is the equation, `applies` returns the argument that a call equals, or None.

    `example`: a function of a 4 x 6 tensor in which the rule applies, which the tests run.
    """

    name: str
    targets: tuple[object, ...]
    applies: Callable[[Node], object]
    example: Example
    inner: tuple[object, ...] = ()

    def rewrite(self, n: Node) -> Rewrite | None:
        """Replace a call by the argument that it equals in values and layout; return None if there is none."""
        source = self.applies(n)
        if not isinstance(source, Node) or not same_layout(val(n), val(source)) or any(map(writes, source.users)):
            return None
        before = (described(n),)
        n.replace_all_uses_with(source)
        n.graph.erase_node(n)
        return Rewrite(self.name, before, (described(source),))


def _neutral(number: float) -> Callable[[Node], object]:
    def applies(n: Node) -> object:
        if n.kwargs.get("alpha", 1) != 1 and number != 0:
            return None
        return n.args[0] if type(n.args[1]) in (int, float) and n.args[1] == number else None

    return applies


RULES = (
    # x + 0 -> x is wrong for floats: -0.0 + 0 is +0.0
    Rule("x - 0 -> x", (aten.sub.Tensor, aten.sub.Scalar), _neutral(0), lambda x: torch.sub(x, 0).exp()),
    Rule("x * 1 -> x", (aten.mul.Tensor, aten.mul.Scalar), _neutral(1), lambda x: (x * 1.0).exp()),
    Rule("x / 1 -> x", (aten.div.Tensor, aten.div.Scalar), _neutral(1), lambda x: (x / 1).exp()),
    Rule("x ** 1 -> x", (aten.pow.Tensor_Scalar,), _neutral(1), lambda x: (x**1).exp()),
    Rule(
        "cast to own dtype -> x", (aten._to_copy.default,), lambda n: n.args[0],
        lambda x: aten._to_copy.default(x, dtype=torch.float32).exp(),
    ),
    Rule(
        "same shape -> x", (aten.view.default, aten.expand.default, aten._unsafe_view.default), lambda n: n.args[0],
        lambda x: aten.view.default(x, [4, 6]).exp(),
    ),
    Rule(
        "identity permutation -> x", (aten.permute.default,), lambda n: n.args[0] if _identity(n.args[1]) else None,
        lambda x: x.permute(0, 1).exp(),
    ),
    Rule("whole slice -> x", (aten.slice.Tensor,), lambda n: n.args[0], lambda x: aten.slice.Tensor(x, 0, 0, 4).exp()),
    Rule("cat of one -> x", (aten.cat.default,), lambda n: _only(n.args[0]), lambda x: torch.cat([x], 1).exp()),
    Rule("copy -> x", (aten.clone.default, aten.alias.default), lambda n: n.args[0], lambda x: x.clone().exp()),
    Rule(
        "copy of a permuted copy -> permuted x", (aten.clone.default,), lambda n: _uncopied(n),
        lambda x: x.permute(1, 0).contiguous().permute(1, 0).contiguous().exp(),
        inner=(aten.permute.default, aten.transpose.int),
    ),
)  # fmt: skip
NO_OPS = Rules(RULES, "no-ops", last_first=False)
# What a trace of a backward adds; a joint graph that is not split keeps it.
DETACHED = Rules(
    [Rule("detached -> x", (aten.detach.default, aten.alias.default), lambda n: n.args[0], lambda x: x.detach().exp())],
    "detached copies", last_first=False,
)  # fmt: skip


def _uncopied(n: Node) -> object:
    """Return x permuted for a copy of a permuted copy of x, if it has the strides of that copy; else None."""
    permuted = n.args[0]
    if not isinstance(permuted, Node) or not is_call(permuted, aten.permute.default, aten.transpose.int):
        return None
    copy = permuted.args[0]
    if not isinstance(copy, Node) or not is_call(copy, aten.clone.default):
        return None
    view = insert(n.graph, n, function_of(permuted), (copy.args[0], *permuted.args[1:]))
    if same_layout(val(view), val(n)):
        return view
    n.graph.erase_node(view)
    return None


def _only(parts: object) -> object:
    return parts[0] if isinstance(parts, (list, tuple)) and len(parts) == 1 else None


def _identity(order: object) -> bool:
    return isinstance(order, (list, tuple)) and all(k % len(order) == i for i, k in enumerate(order))


def no_ops(gm: GraphModule) -> dict[str, int]:
    """Replace calls whose result equals their argument in values and layout; return the number by rule."""
    return counts(no_ops_of(gm, NO_OPS))


def normalise(gm: GraphModule) -> list[Rewrite]:
    """Remove detached copies, casts and views without effect, and dead code, in place; return the rewrites.

    Patterns are searched in graphs, and traced from functions, in this form.
    """
    done = no_ops_of(gm, DETACHED) + no_ops_of(gm, NO_OPS)
    drop_dead(gm.graph)
    return done


def no_ops_of(gm: GraphModule, rules: Rules) -> list[Rewrite]:
    """Apply rules for no-ops at every node that the graph does not return; return what they did."""
    return rules.apply(gm, skip=feeds_output)


def join_cats(gm: GraphModule) -> int:
    """Replace a cat of cats along the same dimension by one cat; return the number of inner cats."""
    count = 0
    for n in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, rank = n.args[0], val(n).dim()
        joined: list[object] = []
        for part in parts:
            inner = isinstance(part, Node) and part.target is aten.cat.default and len(part.users) == 1
            if inner and val(part).dtype == val(n).dtype and _cat_dim(part) % rank == _cat_dim(n) % rank:
                joined.extend(part.args[0])
                count += 1
            else:
                joined.append(part)
        if len(joined) != len(parts) or any(a is not b for a, b in zip(joined, parts, strict=True)):
            n.args = (joined, *n.args[1:])
    return count


def _cat_dim(n: Node) -> int:
    dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim


_FILLED: dict[object, Callable[[Node], Argument]] = {
    aten.full.default: lambda n: n.args[1],
    aten.full_like.default: lambda n: n.args[1],
    aten.zeros_like.default: lambda n: 0,
    aten.ones_like.default: lambda n: 1,
    aten.scalar_tensor.default: lambda n: n.args[0],
}
_MOVES = frozenset(
    {aten.view.default, aten.expand.default, aten.permute.default, aten.clone.default, aten.unsqueeze.default}
    | {aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten._unsafe_view.default, aten._to_copy.default}
)
_ARITHMETIC = frozenset(
    {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.eq.Scalar}
    | {aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.logical_not.default}
    | {aten.reciprocal.default, aten.bitwise_not.default}
)
_POSITIONS = frozenset({aten.argmax.default, aten.argmin.default})
_FUNCTIONS = frozenset({aten.rsqrt.default, aten.sqrt.default, aten.exp.default})  # eager has other vector functions


def uniform(gm: GraphModule, exact: bool = False) -> int:
    """Fold arithmetic on tensors whose elements are all one number, and functions of them unless `exact`."""
    with torch_api.real_tensors():
        return _uniform(gm, _ARITHMETIC if exact else _ARITHMETIC | _FUNCTIONS)


def _uniform(gm: GraphModule, folded: Set[object]) -> int:
    numbers: dict[Node, torch.Tensor] = {}
    count = 0
    for n in list(gm.graph.nodes):
        fake = val(n)
        if n.op != "call_function" or not isinstance(fake, torch.Tensor):
            continue
        if n.target in _FILLED:
            number = _FILLED[n.target](n)
            if isinstance(number, (int, float)):
                numbers[n] = torch.full((), number, dtype=fake.dtype)
        elif n.target in _MOVES and (source := n.args[0]) in numbers:
            assert isinstance(source, Node)
            numbers[n] = numbers[source].to(fake.dtype)
        elif n.target in _POSITIONS and _of_one_element(n) and not _depends_on_checks(n):
            numbers[n] = torch.zeros((), dtype=fake.dtype)
            count += _as_full(n, fake, numbers, may_return=True)  # a position is no alias of another value
        elif (
            n.target in folded
            and not n.kwargs
            and all(a in numbers for a in n.args if isinstance(a, Node))
            and any(isinstance(a, Node) for a in n.args)
        ):
            args = [numbers[a] if isinstance(a, Node) else a for a in n.args]
            if not all(isinstance(a, (torch.Tensor, int, float, bool)) for a in args):
                continue
            numbers[n] = n.target(*args).to(fake.dtype)
            count += _as_full(n, fake, numbers)
    return count


def _of_one_element(n: Node) -> bool:
    """Return whether a position is searched among one element: it is 0, whatever the element is."""
    x, dim = val(n.args[0]), n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    if dim is None or x.dim() == 0:
        return statically_known_true(x.numel() == 1)
    assert isinstance(dim, int)
    return statically_known_true(x.shape[dim] == 1)


def _depends_on_checks(n: Node) -> bool:
    """Return whether a value that `n` is computed from may raise for some data, so that it has to be computed."""
    pending, seen = list(n.all_input_nodes), set[Node]()
    while pending:
        new = pending.pop()
        if new not in seen:
            seen.add(new)
            pending += new.all_input_nodes
    return any(x.op == "call_function" and (_call_may_raise(x) or x.is_impure()) for x in seen)


def _call_may_raise(n: Node) -> bool:
    """Return whether a call may raise an error for some data; divisions of floating-point numbers raise none."""
    value = n.meta.get("val")
    if operator_name(n.target) in DIVISIONS and isinstance(value, torch.Tensor) and value.is_floating_point():
        return False
    return may_raise(n.target)


def _as_full(n: Node, fake: torch.Tensor, numbers: dict[Node, torch.Tensor], may_return: bool = False) -> int:
    if (
        (feeds_output(n) and not may_return)
        or not fake.is_contiguous()
        or any(not isinstance(s, int) for s in fake.shape)
    ):
        return 0
    kwargs: dict[str, Argument] = {
        "dtype": fake.dtype,
        "layout": torch.strided,
        "device": fake.device,
        "pin_memory": False,
    }
    new = insert(n.graph, n, aten.full.default, (list(fake.shape), numbers[n].item()), kwargs)
    numbers[new] = numbers[n]
    n.replace_all_uses_with(new)
    n.graph.erase_node(n)
    return 1
