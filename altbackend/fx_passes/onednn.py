"""CPU inference: call oneDNN for linears and convolutions, with packed weights if faster, and fuse epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..aten.view import may_alias
from ..debug.trace import DecisionKind
from .context import Context
from .cse import feeds_output
from .graph import aten, insert, is_call, only_user, replace, val
from .simplify import same_layout

mkldnn = torch.ops.mkldnn


def run(gm: GraphModule, ctx: Context) -> int:
    """Call oneDNN for linears and convolutions; with freezing, pack their weights."""
    count = call_onednn(gm, ctx.constant_nodes(gm), pack=ctx.freezes)
    packed = sum(bool(n.meta.get("opaque")) for n in gm.graph.nodes)
    ctx.trace.decision(
        DecisionKind.FREEZING, "linears and convolutions", "on oneDNN", f"{count}, {packed} with packed weights"
    )
    return count


@dataclass(frozen=True)
class Epilogue:
    """A oneDNN post-operation: name, scalars, algorithm, and the last node of the pattern that it replaces."""

    attr: str
    scalars: tuple[Any, ...]
    algorithm: str
    last: Node


def available() -> bool:
    """Return whether this build of torch has oneDNN and it is enabled."""
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[no-untyped-call]


def call_onednn(gm: GraphModule, constant: set[Node], pack: bool = True) -> int:
    """Replace matmuls and convolutions whose weights are constant by calls of oneDNN; return their number.

    `pack`: store weights in oneDNN's own layout if that is faster; else oneDNN reads them in their present layout.
    """
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.addmm.default, aten.mm.default):
            count += _linear(gm, n, constant, pack)
        elif is_call(n, aten.convolution.default):
            count += _convolution(gm, n, constant, pack)
    return count


def _floats(*nodes: Any) -> bool:
    return all(val(n).dtype == torch.float32 for n in nodes if isinstance(n, Node))


def _linear(gm: GraphModule, n: Node, constant: set[Node], pack: bool) -> int:
    bias, x, wt = (None, *n.args) if n.target is aten.mm.default else n.args[:3]
    if n.kwargs or not isinstance(wt, Node) or wt not in constant or not isinstance(x, Node) or x in constant:
        return 0
    if bias is not None and (bias not in constant or val(bias).dim() != 1 or val(bias).shape[0] != val(wt).shape[1]):
        return 0
    if not _floats(x, wt, bias) or any(s == 0 for s in (*val(x).shape, *val(wt).shape)):
        return 0
    weight = insert(gm.graph, n, aten.permute.default, (wt, [1, 0]))
    constant.add(weight)
    if pack and not _fast_unpacked(val(wt)):
        rows = val(x).shape[0]
        batch = rows if isinstance(rows, int) else None
        weight = _packed(gm, n, mkldnn._reorder_linear_weight.default, (weight, batch))
        constant.add(weight)
    epilogue = _activation_after(n)
    attr, algorithm = ("none", "") if epilogue is None else (epilogue.attr, epilogue.algorithm)
    with gm.graph.inserting_before(n):
        new = gm.graph.call_function(mkldnn._linear_pointwise.default, (x, weight, bias, attr, [], algorithm))
    new.meta["val"] = val(n).contiguous() if not val(n).is_contiguous() else val(n)
    new.meta["stack_trace"] = n.meta.get("stack_trace")
    if epilogue is not None:
        # a pointwise operator commutes with the view between it and the matmul
        source = epilogue.last.args[0]
        assert isinstance(source, Node)
        epilogue.last.replace_all_uses_with(source)
        gm.graph.erase_node(epilogue.last)
    replace(n, new)
    return 1


def _fast_unpacked(wt: torch.Tensor) -> bool:
    """Return whether oneDNN is as fast on a weight (in, out) as on a packed copy, which costs time and memory.

    Measured with 1 to 512 rows, time relative to packed: contiguous (in, out) takes 0.91 on AVX2 and 0.98 on AVX-512
    (two threads each; 1.05 with four). Rows whose distance is a multiple of 2,048 bytes share cache sets and take up to
    1.8. Weights (out, in) take 0.93 on AVX2 and 1.04 to 1.10 on AVX-512, some shapes 3.5.
    """
    return wt.is_contiguous() and wt.stride(0) * wt.element_size() % 2048 != 0


def _activation_after(n: Node) -> Epilogue | None:
    """Return the GELU, SiLU or ReLU that is the only reader of a linear, directly or through one view, or None."""
    user = only_user(n)
    if is_call(user, aten.view.default) and user is not None:
        user = only_user(user)
    if user is None or feeds_output(user):
        return None
    if is_call(user, aten.gelu.default):
        approximate = user.kwargs.get("approximate", user.args[1] if len(user.args) > 1 else "none")
        return Epilogue("gelu", (), str(approximate), user)
    rule = _UNARY.get(user.target) if user.target in (aten.relu.default, aten.silu.default) else None
    return rule(user) if rule else None


def _packed(gm: GraphModule, before: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """Insert a call that packs a weight into oneDNN's own layout; only calls of oneDNN may take its result."""
    with gm.graph.inserting_before(before):
        new = gm.graph.call_function(target, args)
    new.meta["val"] = val(args[0])
    new.meta["opaque"] = True
    return new


def _convolution(gm: GraphModule, n: Node, constant: set[Node], pack: bool) -> int:
    x, w, bias, stride, padding, dilation, transposed, _, groups = n.args
    if transposed or w not in constant or (bias is not None and bias not in constant) or not _floats(x, w, bias):
        return 0
    if val(x).dim() != 4 or any(not isinstance(s, int) for s in val(x).shape) or 0 in val(x).shape:
        return 0
    sizes = list(val(x).shape)
    assert isinstance(w, Node)
    weight = w
    if pack:
        geometry = (w, padding, stride, dilation, groups, sizes)
        weight = _packed(gm, n, mkldnn._reorder_convolution_weight.default, geometry)
        constant.add(weight)
    epilogue = _unary_after(n)
    last = epilogue.last if epilogue else n
    attr, scalars, algorithm = (
        (epilogue.attr, list(epilogue.scalars), epilogue.algorithm) if epilogue else ("none", [], "")
    )
    added = None if epilogue else _add_after(n)
    if added is not None:
        _fuse_add(gm, n, added, weight)
        return 1
    with gm.graph.inserting_before(n):
        new = gm.graph.call_function(
            mkldnn._convolution_pointwise.default,
            (x, weight, bias, padding, stride, dilation, groups, attr, scalars, algorithm),
        )
    new.meta = dict(n.meta)
    _replace_chain(n, last, new)
    return 1


def _replace_chain(first: Node, last: Node, new: Node) -> None:
    """Replace `first` and `last` (equal, or the only user of `first`) by `new`."""
    replace(last, new)
    if first is not last:
        first.graph.erase_node(first)


def _unary_after(n: Node) -> Epilogue | None:
    user = only_user(n)
    if user is None:
        return None
    rule = _UNARY.get(user.target)
    return rule(user) if rule else None


_UNARY: dict[Any, Callable[[Node], Epilogue | None]] = {
    aten.relu.default: lambda u: Epilogue("relu", (), "", u),
    aten.hardtanh.default: lambda u: Epilogue("hardtanh", (*u.args[1:], *(-1.0, 1.0)[len(u.args) - 1 :]), "", u),
    aten.hardswish.default: lambda u: Epilogue("hardswish", (), "", u),
    aten.hardsigmoid.default: lambda u: Epilogue("hardsigmoid", (), "", u),
    aten.silu.default: lambda u: Epilogue("swish", (), "", u),
    aten.sigmoid.default: lambda u: Epilogue("sigmoid", (), "", u),
}


def _add_after(n: Node) -> Node | None:
    """Return the residual addition after a convolution, or None; the addend has the same layout and precedes it."""
    user = only_user(n)
    if not is_call(user, aten.add.Tensor) or user is None or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[0] if user.args[1] is n else user.args[1]
    if not isinstance(other, Node) or other is n or not isinstance(val(other), torch.Tensor):
        return None
    if all(s == 1 for s in val(n).shape[2:]):
        return None  # with channels-last strides torch 2.11 fails on it ("could not create a memory")
    return user if same_layout(val(other), val(n)) and other.op != "get_attr" else None


def _dies_at(n: Node, last: Node) -> bool:
    """Return whether `n` owns its storage, is the result of a library call, and has no reader after `last`."""
    if n.op != "call_function" or n.target not in _OWNING:
        return False
    order = {m: k for k, m in enumerate(n.graph.nodes)}
    return all(order[u] <= order[last] and not may_alias(u) for u in n.users) and not feeds_output(n)


_OWNING = frozenset(
    {
        mkldnn._convolution_pointwise.default,
        mkldnn._convolution_pointwise.binary,
        mkldnn._convolution_pointwise_.binary,
    }
)


def _fuse_add(gm: GraphModule, n: Node, add: Node, weight: Node) -> None:
    x, _, bias, stride, padding, dilation, _, _, groups = n.args
    other = add.args[0] if add.args[1] is n else add.args[1]
    assert isinstance(other, Node)
    dies = other is not x and _dies_at(other, add)
    relu = only_user(add)
    unary = relu if is_call(relu, aten.relu.default) else None
    with gm.graph.inserting_before(add):
        # in place if the addend has no later reader: oneDNN then accumulates into it instead of copying it
        target = mkldnn._convolution_pointwise_.binary if dies else mkldnn._convolution_pointwise.binary
        operands = (other, x) if dies else (x, other)
        convolution = (weight, bias, padding, stride, dilation, groups)
        post: tuple[Any, ...] = ("add", 1.0, "relu" if unary else None, [], "")
        new = gm.graph.call_function(target, (*operands, *convolution, *post))
    new.meta = dict(n.meta)
    if unary is not None:
        replace(unary, new)
        gm.graph.erase_node(add)
    else:
        replace(add, new)
    gm.graph.erase_node(n)
