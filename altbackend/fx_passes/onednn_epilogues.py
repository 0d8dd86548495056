"""CPU inference: fuse what follows a linear or a convolution into its oneDNN call.

    relu(conv(x))     -> conv(x, "relu")
    conv(x) + y       -> conv(x, y, "add")
    relu(conv(x) + y) -> conv(x, y, "add", "relu")

Where `y` has no later reader, oneDNN accumulates into its memory. The activation sees the unrounded result, so a fused
16-bit call rounds once. oneDNN's comparisons drop NaN (relu(NaN) = 0), and its functions have other last bits, so
nothing is fused with `numerics="eager"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ..aten.view import may_alias
from .context import Context
from .cse import feeds_output
from .graph import aten, insert, is_call, only_user, replace, val
from .mixed_layouts import is_channels_last
from .onednn import mkldnn
from .simplify import same_layout

_LINEAR = mkldnn._linear_pointwise.default
_CONVOLUTION = mkldnn._convolution_pointwise.default
_TRANSPOSED = mkldnn._convolution_transpose_pointwise.default
KINDS: Mapping[object, str] = MappingProxyType(
    {_LINEAR: "linear", _CONVOLUTION: "convolution", _TRANSPOSED: "transposed convolution"}
)

# (kind, operator) whose fusion does not pay: benchmarks/results/onednn.md
UNPROFITABLE: frozenset[tuple[str, str]] = frozenset({("linear", "add"), ("linear", "sub"), ("linear", "mul")})


@dataclass(frozen=True)
class Unary:
    """An activation as oneDNN takes it: its name, its numbers and its algorithm."""

    name: str
    scalars: tuple[Argument, ...] = ()
    algorithm: str = ""


def run(gm: GraphModule, ctx: Context) -> int:
    """Fuse activations and binary operators into the calls before them; return their number."""
    return fuse(gm, UNPROFITABLE)


def fuse(gm: GraphModule, unprofitable: frozenset[tuple[str, str]] = frozenset()) -> int:
    """Fuse all but `unprofitable` pairs of a kind of call and an operator; return the number of fused operators."""
    count = 0
    for n in list(gm.graph.nodes):
        kind = KINDS.get(n.target)
        if kind is None or n.op != "call_function":
            continue
        count += _fuse_unary(gm, n, kind, unprofitable) or _fuse_binary(gm, n, kind, unprofitable)
    return count


# --- activations -----------------------------------------------------------------------------------------------------


def _arguments(n: Node, *defaults: float) -> tuple[Argument, ...] | None:
    """Return the arguments after the first, completed by `defaults`; None if some are named or no numbers."""
    given = n.args[1:]
    if n.kwargs or not all(isinstance(a, (int, float)) for a in given):
        return None
    return (*given, *defaults[len(given) :])


def _plain(name: str) -> Callable[[Node], Unary | None]:
    return lambda n: Unary(name)


def _gelu(n: Node) -> Unary:
    return Unary("gelu", (), str(n.kwargs.get("approximate", n.args[1] if len(n.args) > 1 else "none")))


def _hardtanh(n: Node) -> Unary | None:
    limits = _arguments(n, -1.0, 1.0)
    return None if limits is None else Unary("hardtanh", limits)


def _leaky_relu(n: Node) -> Unary | None:
    slope = _arguments(n, 0.01)
    return None if slope is None else Unary("leaky_relu", slope)


_UNARY: Mapping[object, Callable[[Node], Unary | None]] = MappingProxyType(
    {
        aten.relu.default: _plain("relu"),
        aten.sigmoid.default: _plain("sigmoid"),
        aten.tanh.default: _plain("tanh"),
        aten.hardswish.default: _plain("hardswish"),
        aten.hardsigmoid.default: _plain("hardsigmoid"),
        aten.silu.default: _plain("swish"),
        aten.hardtanh.default: _hardtanh,
        aten.leaky_relu.default: _leaky_relu,
        aten.gelu.default: _gelu,
    }
)


def unary_of(n: Node | None) -> Unary | None:
    """Return the activation that a call computes, as oneDNN takes it, or None."""
    rule = _UNARY.get(n.target) if n is not None and n.op == "call_function" else None
    return rule(n) if rule is not None and n is not None else None


def _reader(n: Node, kind: str) -> Node | None:
    """Return the only reader of a call, directly or through views: a pointwise operator commutes with them."""
    user = only_user(n)
    # of an image that was a sequence, or an image that became rows
    between = (aten.view.default, aten.permute.default) if kind == "linear" else (aten.squeeze.dim,)
    while user is not None and is_call(user, *between):
        user = only_user(user)
    return user


def _fuse_unary(gm: GraphModule, n: Node, kind: str, unprofitable: frozenset[tuple[str, str]]) -> int:
    user = _reader(n, kind)
    unary = unary_of(user)
    if user is None or unary is None or (kind, unary.name) in unprofitable or val(user).dtype != val(n).dtype:
        return 0
    n.args = (*n.args[:-3], unary.name, list(unary.scalars), unary.algorithm)
    source = user.args[0]
    assert isinstance(source, Node)
    replace(user, source)
    return 1


# --- binary operators ------------------------------------------------------------------------------------------------

_BINARY: Mapping[object, str] = MappingProxyType(
    {aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul"}
)


def _operand(n: Node | None, source: Node | None) -> Node | None:
    """Return the other operand of a binary operator that reads `source` once, as oneDNN takes it, or None."""
    if n is None or source is None or n.target not in _BINARY or n.kwargs or len(n.args) != 2:
        return None
    left, right = n.args
    if left is source and right is not source:
        other = right
    elif right is source and left is not source and n.target is not aten.sub.Tensor:
        other = left
    else:
        return None
    if not isinstance(other, Node) or other.op == "get_attr" or not same_layout(val(other), val(source)):
        return None
    return other if same_layout(val(n), val(source)) else None


def _fuse_binary(gm: GraphModule, n: Node, kind: str, unprofitable: frozenset[tuple[str, str]]) -> int:
    user, first = _reader(n, kind), only_user(n)
    source = n if user is first else first
    if source is None or (source is not n and is_call(source, aten.permute.default)):
        return 0
    other = _operand(user, source)
    if user is None or other is None or (kind, _BINARY[user.target]) in unprofitable:
        return 0
    if kind == "linear":
        return _add_to_linear(gm, n, user, other)
    return 0 if kind != "convolution" else _add_to_convolution(gm, n, user, other)


def _add_to_linear(gm: GraphModule, n: Node, user: Node, other: Node) -> int:
    x, weight, bias = n.args[:3]
    if val(n).dim() != val(other).dim():
        if not val(other).is_contiguous():
            return 0
        other = insert(gm.graph, user, aten.view.default, (other, list(val(n).shape)))
    with gm.graph.inserting_before(user):
        call = mkldnn._linear_pointwise.binary
        new = gm.graph.call_function(call, (x, other, weight, bias, _BINARY[user.target]))
    new.meta = dict(n.meta)
    if val(user).dim() != val(n).dim():
        new = insert(gm.graph, user, aten.view.default, (new, list(val(user).shape)))
    replace(user, new)
    for old in [m for m in n.users if is_call(m, aten.view.default)]:
        gm.graph.erase_node(old)
    gm.graph.erase_node(n)
    return 1


def _add_to_convolution(gm: GraphModule, n: Node, user: Node, other: Node) -> int:
    x, weight, bias, padding, stride, dilation, groups = n.args[:7]
    sequence = val(user).dim() < val(n).dim()
    image = insert(gm.graph, user, aten.unsqueeze.default, (other, 2)) if sequence else other
    # torch 2.11 fails on images of one pixel with channels-last strides ("could not create a memory"). Every version
    # fails on other images in 16 bits. With groups, the operator calls ATen one by one.
    wide = any(statically_known_true(s > 1) for s in val(n).shape[2:])
    if groups != 1 or not wide or not all(is_channels_last(val(a)) for a in (n, x, image)):
        return 0
    after = only_user(user)
    relu = after if is_call(after, aten.relu.default) and after is not None else None
    dies = user.target is aten.add.Tensor and not sequence and other is not x and _dies_at(other, user)
    with gm.graph.inserting_before(user):
        # in place if the addend has no later reader: oneDNN then accumulates into it instead of copying it
        target = mkldnn._convolution_pointwise_.binary if dies else mkldnn._convolution_pointwise.binary
        operands = (image, x) if dies else (x, image)
        geometry = (weight, bias, padding, stride, dilation, groups)
        post: tuple[Argument, ...] = (_BINARY[user.target], 1.0, "relu" if relu is not None else None, [], "")
        new = gm.graph.call_function(target, (*operands, *geometry, *post))
    new.meta = dict(n.meta)
    result = insert(gm.graph, user, aten.squeeze.dim, (new, 2)) if sequence else new
    if relu is not None:
        replace(relu, result)
        gm.graph.erase_node(user)
    else:
        replace(user, result)
    for old in [m for m in n.users if is_call(m, aten.squeeze.dim)]:
        gm.graph.erase_node(old)
    gm.graph.erase_node(n)
    return 2 if relu is not None else 1


def _dies_at(n: Node, last: Node) -> bool:
    """Return whether `n` owns its storage, is the result of a library call, and has no reader after `last`."""
    if n.op != "call_function" or n.target not in _OWNING:
        return False
    order = {m: k for k, m in enumerate(n.graph.nodes)}
    return all(order[u] <= order[last] and not may_alias(u) for u in n.users) and not feeds_output(n)


_OWNING = frozenset(
    {
        _CONVOLUTION,
        _TRANSPOSED,
        mkldnn._convolution_pointwise.binary,
        mkldnn._convolution_pointwise_.binary,
    }
)
