"""Replace random operators by functions of a seed and the position of an element, which kernels compute and fuse.

One call at the first random operator draws the seeds of all random operators from torch's generator. So
`torch.manual_seed` determines the numbers, every call has its own, and a replayed CUDA graph draws new ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..aten.random import is_random
from ..debug.trace import DecisionKind, Trace
from ..runtime import philox as draws
from .context import Context
from .graph import aten, insert, is_call, replace, val

LARGEST_RANGE = 2**31  # of integers: its product with a 32-bit word fits in 64 bits
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def run(gm: GraphModule, ctx: Context) -> int:
    """Replace random operators by functions of seeds; the decision log has the reason for each that stays a call."""
    expose_dropout(gm)
    return _from_seeds(gm, [n for n in gm.graph.nodes if is_random(n.target)], ctx.trace)


def run_dropout(gm: GraphModule, ctx: Context) -> int:
    """Rewrite the dropouts of a joint graph; return their number."""
    return expose_dropout(gm)


def run_checkpointed(gm: GraphModule, ctx: Context) -> int:
    """Rewrite random operators of checkpointed regions as functions of saved seeds, so that they can be recomputed.

    To recompute the original operators, the state of the generator would have to be restored.
    """
    checkpointed = [n for n in gm.graph.nodes if is_random(n.target) and "recompute" in n.meta]
    return _from_seeds(gm, checkpointed, ctx.trace)


def expose_dropout(gm: GraphModule) -> int:
    """Rewrite dropouts as a uniform draw and pointwise operators, so that a backward can save the mask only.

    Return their number.
    """
    dropouts = [n for n in gm.graph.nodes if is_call(n, aten.native_dropout.default)]
    static = [n for n in dropouts if isinstance(n.args[1], (int, float))]
    for n in static:
        _dropout(gm, n)
    return len(static)


def _dropout(gm: GraphModule, n: Node) -> None:
    # x [u >= p] / (1 - p), u uniform in [0, 1): a product, so that NaN stays NaN where it is dropped, as in eager
    operands: tuple[Any, ...] = n.args
    x, p, train = operands

    def call(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return _part_of(n, insert(gm.graph, n, target, args, kwargs))

    if train is False or p == 0:
        mask, out = call(aten.ones_like.default, x, dtype=torch.bool), call(aten.clone.default, x)
    else:
        mask = call(aten.ge.Scalar, call(aten.rand_like.default, x, dtype=torch.float32), p)
        out = call(aten.mul.Tensor, call(aten.mul.Tensor, x, mask), 1 / (1 - p) if p < 1 else 0.0)
    for user in list(n.users):
        if user.target is operator.getitem:
            replace(user, (out, mask)[user.args[1]])  # type: ignore[index]
    if not n.users:
        gm.graph.erase_node(n)


_CHECKPOINT = ("recompute", "ac_graph_id")


def _part_of(old: Node, new: Node) -> Node:
    """Return `new` with the checkpoint policy of `old`, which it partly replaces."""
    new.meta.update({k: old.meta[k] for k in _CHECKPOINT if k in old.meta})
    return new


def _from_seeds(gm: GraphModule, random: list[Node], trace: Trace) -> int:
    device = _device(gm)
    replaceable: list[Node] = []
    for n in random:
        reason = _refusal(n, device)
        trace.decision(
            DecisionKind.RANDOM, n.name, "library call" if reason else "in kernels", reason or "from its own seed"
        )
        if not reason:
            replaceable.append(n)
    if not replaceable:
        return 0
    seeds = insert(gm.graph, replaceable[0], draws.philox_seeds, (len(replaceable), device))
    for k, n in enumerate(replaceable):
        seed = insert(gm.graph, n, operator.getitem, (seeds, k))
        replace(n, _REWRITES[n.target](_Draw(gm, n, seed)), keep_meta=True)
    return len(replaceable)


def _device(gm: GraphModule) -> torch.device:
    """Return the device of the graph's kernels: its GPU if it has one, else the CPU."""
    vals = [val(n) for n in gm.graph.nodes]
    gpu = (v.device for v in vals if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    return next(gpu, torch.device("cpu"))


def _refusal(n: Node, device: torch.device) -> str:
    """Return the reason why an operator keeps drawing from torch's generator, or ''."""
    out = val(n)
    if n.target not in _REWRITES:
        return f"{n.target} has no rewrite"
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided:
        return "its result is not a dense tensor"
    if out.device != device:
        return f"it draws on the {out.device.type} in a graph of the {device.type}"
    if n.kwargs.get("generator") is not None:
        return "it has its own generator"
    if not _is_valid(n):
        return "its range is empty, which the library reports"
    if n.target in _INTEGERS:
        low, high = _ends(n)
        if not isinstance(low, int) or not isinstance(high, int) or not 0 < high - low <= LARGEST_RANGE:
            return f"kernels draw integers of static ranges up to {LARGEST_RANGE}"
        return "" if not out.dtype.is_complex and out.dtype != torch.bool else f"it draws {out.dtype}"
    if out.dtype not in _FLOATS:
        return f"it draws {out.dtype}"
    return "" if not any(isinstance(a, torch.SymFloat) for a in map(val, n.args)) else "its range depends on sizes"


def _is_valid(n: Node) -> bool:
    """Return whether the numbers that bound a draw are in order, as far as they are static."""
    first, second, *_ = (*n.args[1:], None, None)
    low, high = n.kwargs.get("from", first), n.kwargs.get("to", second)
    if n.target is aten.uniform.default and isinstance(low, (int, float)):
        return low <= high if isinstance(high, (int, float)) else low <= 1
    p = n.kwargs.get("p", first)
    return not (n.target is aten.bernoulli.p and isinstance(p, (int, float))) or 0 <= p <= 1


class _Draw:
    """Inserts the calls that replace one random operator, before it."""

    def __init__(self, gm: GraphModule, node: Node, seed: Node) -> None:
        self.gm, self.node, self.seed = gm, node, seed
        self.dtype: torch.dtype = val(node).dtype

    def call(self, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        """Insert a call before the operator."""
        return _part_of(self.node, insert(self.gm.graph, self.node, target, args, kwargs))

    def arg(self, k: int, name: str, default: float | None) -> Any:
        """Return an argument of the operator, by position or by name."""
        n = self.node
        return n.args[k] if len(n.args) > k else n.kwargs.get(name, default)

    def draw(self, target: Callable[..., torch.Tensor], shape: Argument, *args: Argument) -> Node:
        """Insert a function of the seed, from `runtime.philox`."""
        return self.call(target, self.seed, shape, *args)

    def require_probabilities(self, p: Argument) -> None:
        """Insert eager's check that all elements of a tensor are between 0 and 1."""
        graph, n = self.gm.graph, self.node
        low, high = (insert(graph, n, op, (p, limit)) for op, limit in ((aten.ge.Scalar, 0), (aten.le.Scalar, 1)))
        valid = insert(graph, n, aten.all.default, (insert(graph, n, aten.logical_and.default, (low, high)),))
        insert(graph, n, aten._assert_async.msg, (valid, "bernoulli expects all probabilities to be in [0, 1]"))

    def scaled(self, x: Node, factor: Argument, offset: Argument) -> Node:
        """Return x * factor + offset; factor and offset are numbers or tensors."""
        x = x if factor == 1 else self.call(aten.mul.Tensor, x, factor)
        return x if offset == 0 else self.call(aten.add.Tensor, x, offset)

    def cast(self, x: Node) -> Node:
        """Return `x` in the dtype of the operator's result."""
        return x if val(x).dtype == self.dtype else self.call(aten._to_copy.default, x, dtype=self.dtype)


def _uniform(draw: _Draw) -> Node:
    return draw.draw(draws.philox_uniform, draw.node.args[0], draw.dtype)


def _normal(draw: _Draw) -> Node:
    return draw.draw(draws.philox_normal, draw.node.args[0], draw.dtype)


def _uniform_between(draw: _Draw) -> Node:
    low, high = draw.arg(1, "from", 0.0), draw.arg(2, "to", 1.0)
    return draw.scaled(_uniform(draw), high - low, low)


def _normal_around(draw: _Draw) -> Node:
    return draw.scaled(_normal(draw), draw.arg(2, "std", 1.0), draw.arg(1, "mean", 0.0))


def _normal_around_each(draw: _Draw) -> Node:
    mean, std = draw.node.args[0], draw.arg(1, "std", 1.0)
    return draw.scaled(_normal(draw), std, mean)


def _bernoulli(draw: _Draw) -> Node:
    x = draw.node.args[0]
    p = draw.arg(1, "p", None) if draw.node.target is aten.bernoulli.p else x
    if p is x:
        draw.require_probabilities(x)
    u = draw.draw(draws.philox_uniform, x, torch.float32)
    return draw.cast(draw.call(aten.lt.Scalar if p is not x else aten.lt.Tensor, u, p))


def _integers(draw: _Draw) -> Node:
    low, high = _ends(draw.node)
    shape = draw.node.args[0 if draw.node.target in _INTEGERS_LIKE else len(draw.node.args) - 1]
    return draw.draw(draws.philox_integers, shape, low, high, draw.dtype)


_INTEGERS_LIKE = frozenset({aten.randint_like.default, aten.randint_like.low_dtype})
_INTEGERS = frozenset({aten.randint.default, aten.randint.low}) | _INTEGERS_LIKE


def _ends(n: Node) -> tuple[Argument, Argument]:
    """Return the half-open range of a draw of integers."""
    ends = n.args[1:] if n.target in _INTEGERS_LIKE else n.args[:-1]
    return (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])


_REWRITES: dict[object, Callable[[_Draw], Node]] = {
    aten.rand.default: _uniform,
    aten.rand_like.default: _uniform,
    aten.randn.default: _normal,
    aten.randn_like.default: _normal,
    aten.uniform.default: _uniform_between,
    aten.normal_functional.default: _normal_around,
    aten.normal.Tensor_float: _normal_around_each,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    **dict.fromkeys(_INTEGERS, _integers),
}
