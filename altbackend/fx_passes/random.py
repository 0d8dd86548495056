"""Random operators become functions of a seed and an element's position, which kernels compute beside other work.

A graph draws its seeds in one call at its first random operator, one for each operator, from torch's generator. So
`torch.manual_seed` decides the numbers, every call has its own, and a recorded call is replayed with new ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..debug.trace import DecisionKind, Trace
from ..runtime import philox as draws
from .graph import aten, insert, is_call, replace, val

LARGEST_RANGE = 2**31  # of integers: a 32-bit word times it fits in 64 bits
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def expose_dropout(gm: GraphModule) -> int:
    """Dropouts as a uniform draw and a pointwise rest, so that a backward may keep the mask alone. Gives how many."""
    found = [n for n in gm.graph.nodes if is_call(n, aten.native_dropout.default)]
    plain = [n for n in found if isinstance(n.args[1], (int, float))]
    for n in plain:
        _dropout(gm, n)
    return len(plain)


def expose_checkpointed(joint: GraphModule, trace: Trace) -> None:
    """What checkpointed regions draw as functions of seeds, which are kept: so it is computed again like anything else.

    The generator would have to be set back for operators that stay.
    """
    _from_seeds(joint, [n for n in joint.graph.nodes if _draws(n) and "recompute" in n.meta], trace)


def _dropout(gm: GraphModule, n: Node) -> None:
    # x [u >= p] / (1 - p), u uniform in [0, 1): a product, so that NaN stays NaN where it is dropped, as in eager
    operands: tuple[Any, ...] = n.args
    x, p, train = operands

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return _part_of(n, insert(gm.graph, n, target, args, kwargs))

    if train is False or p == 0:
        kept, out = call(aten.ones_like.default, x, dtype=torch.bool), call(aten.clone.default, x)
    else:
        kept = call(aten.ge.Scalar, call(aten.rand_like.default, x, dtype=torch.float32), p)
        out = call(aten.mul.Tensor, call(aten.mul.Tensor, x, kept), 1 / (1 - p) if p < 1 else 0.0)
    for user in list(n.users):
        if user.target is operator.getitem:
            replace(user, (out, kept)[user.args[1]])  # type: ignore[index]
    if not n.users:
        gm.graph.erase_node(n)


def run(gm: GraphModule, trace: Trace) -> None:
    """Replace what the graph draws by functions of seeds; what does not fit stays a library call, with a reason."""
    expose_dropout(gm)
    _from_seeds(gm, [n for n in gm.graph.nodes if _draws(n)], trace)


_CHECKPOINT = ("recompute", "ac_graph_id")


def _part_of(old: Node, new: Node) -> Node:
    """`new`, under the checkpoint policy of the node that it is a part of."""
    new.meta.update({k: old.meta[k] for k in _CHECKPOINT if k in old.meta})
    return new


def _from_seeds(gm: GraphModule, random: list[Node], trace: Trace) -> None:
    device = _device(gm)
    fit: list[Node] = []
    for n in random:
        reason = _refusal(n, device)
        trace.decision(
            DecisionKind.RANDOM, n.name, "library call" if reason else "in kernels", reason or "from a seed of its own"
        )
        if not reason:
            fit.append(n)
    if not fit:
        return
    seeds = insert(gm.graph, fit[0], draws.philox_seeds, (len(fit), device))
    for k, n in enumerate(fit):
        seed = insert(gm.graph, n, operator.getitem, (seeds, k))
        replace(n, _REWRITES[n.target](_At(gm, n, seed)), keep_meta=True)


def _draws(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags


def _device(gm: GraphModule) -> torch.device:
    """Where the graph's kernels run: its GPU if it has one."""
    vals = [val(n) for n in gm.graph.nodes]
    gpu = (v.device for v in vals if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    return next(gpu, torch.device("cpu"))


def _refusal(n: Node, device: torch.device) -> str:
    """Why an operator keeps drawing from torch's generator, or ''."""
    out = val(n)
    if n.target not in _REWRITES:
        return f"{n.target} has no form in kernels"
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided:
        return "its result is no dense tensor"
    if out.device != device:
        return f"it draws on the {out.device.type} beside kernels of the {device.type}"
    if n.kwargs.get("generator") is not None:
        return "it has a generator of its own"
    if n.target in _INTEGERS:
        low, high = _ends(n)
        if not isinstance(low, int) or not isinstance(high, int) or not 0 < high - low <= LARGEST_RANGE:
            return f"kernels draw integers of known ranges up to {LARGEST_RANGE}"
        return "" if not out.dtype.is_complex and out.dtype != torch.bool else f"it draws {out.dtype}"
    if out.dtype not in _FLOATS:
        return f"it draws {out.dtype}"
    return "" if not any(isinstance(a, torch.SymFloat) for a in map(val, n.args)) else "its range depends on sizes"


class _At:
    """The calls that take the place of one random operator, before it."""

    def __init__(self, gm: GraphModule, node: Node, seed: Node) -> None:
        self.gm, self.node, self.seed = gm, node, seed
        self.dtype: torch.dtype = val(node).dtype

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return _part_of(self.node, insert(self.gm.graph, self.node, target, args, kwargs))

    def arg(self, k: int, name: str, default: Any) -> Any:
        n = self.node
        return n.args[k] if len(n.args) > k else n.kwargs.get(name, default)

    def draw(self, target: Callable[..., torch.Tensor], shape: Any, *args: Any) -> Node:
        return self.call(target, self.seed, shape, *args)

    def scaled(self, x: Any, factor: Any, offset: Any) -> Any:
        """x * factor + offset, where they are numbers or tensors."""
        x = x if factor == 1 else self.call(aten.mul.Tensor, x, factor)
        return x if offset == 0 else self.call(aten.add.Tensor, x, offset)

    def cast(self, x: Node) -> Node:
        return x if val(x).dtype == self.dtype else self.call(aten._to_copy.default, x, dtype=self.dtype)


def _uniform(at: _At) -> Node:
    return at.draw(draws.philox_uniform, at.node.args[0], at.dtype)


def _normal(at: _At) -> Node:
    return at.draw(draws.philox_normal, at.node.args[0], at.dtype)


def _uniform_between(at: _At) -> Any:
    low, high = at.arg(1, "from", 0.0), at.arg(2, "to", 1.0)
    return at.scaled(_uniform(at), high - low, low)


def _normal_around(at: _At) -> Any:
    return at.scaled(_normal(at), at.arg(2, "std", 1.0), at.arg(1, "mean", 0.0))


def _normal_around_each(at: _At) -> Any:
    mean, std = at.node.args[0], at.arg(1, "std", 1.0)
    return at.scaled(_normal(at), std, mean)


def _bernoulli(at: _At) -> Node:
    x = at.node.args[0]
    p = at.arg(1, "p", None) if at.node.target is aten.bernoulli.p else x
    u = at.draw(draws.philox_uniform, x, torch.float32)
    return at.cast(at.call(aten.lt.Scalar if p is not x else aten.lt.Tensor, u, p))


def _integers(at: _At) -> Node:
    low, high = _ends(at.node)
    shape = at.node.args[0 if at.node.target in _INTEGERS_LIKE else len(at.node.args) - 1]
    return at.draw(draws.philox_integers, shape, low, high, at.dtype)


_INTEGERS_LIKE = frozenset({aten.randint_like.default, aten.randint_like.low_dtype})
_INTEGERS = frozenset({aten.randint.default, aten.randint.low}) | _INTEGERS_LIKE


def _ends(n: Node) -> tuple[Any, Any]:
    """The range of integers, without its end."""
    ends = n.args[1:] if n.target in _INTEGERS_LIKE else n.args[:-1]
    return (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])


_REWRITES: dict[Any, Callable[[_At], Any]] = {
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
