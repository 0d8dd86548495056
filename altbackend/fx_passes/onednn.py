"""CPU inference: linears and convolutions on oneDNN, weights packed where that pays, and fused epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .graph import aten, insert, is_call, only_user, replace, val
from .simplify import feeds_output, is_view, same_layout

mkldnn = torch.ops.mkldnn


@dataclass(frozen=True)
class Epilogue:
    """A oneDNN post-operation: name, scalars, algorithm, and the last node of the pattern that it replaces."""

    attr: str
    scalars: tuple[Any, ...]
    algorithm: str
    last: Node


def available() -> bool:
    # torch leaves these without annotations
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[no-untyped-call]


def run(gm: GraphModule, constant: set[Node], pack: bool = True) -> int:
    """Replace matmuls and convolutions whose weights are constant; gives their number.

    `pack`: give weights oneDNN's own layout where that is faster; else it reads them as they lie.
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
    if pack and not _read_as_it_lies(val(wt)):
        rows = val(x).shape[0]
        known = rows if isinstance(rows, int) else None
        weight = _packed(gm, n, mkldnn._reorder_linear_weight.default, (weight, known))
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


def _read_as_it_lies(wt: torch.Tensor) -> bool:
    """Whether oneDNN is as fast on a weight of (in, out) as on a packed copy, which costs time and the memory again.

    Measured, 1 to 512 rows, both against packed: 0.91 of the time on AVX2, 0.98 on AVX-512 (two threads each; 1.05 with
    four). Rows that begin a multiple of 2,048 bytes apart share cache sets: up to 1.8. Weights of (out, in) take 0.93
    on AVX2 and 1.04 to 1.10 on AVX-512, single shapes 3.5.
    """
    return wt.is_contiguous() and wt.stride(0) * wt.element_size() % 2048 != 0


def _activation_after(n: Node) -> Epilogue | None:
    """A GELU, SiLU or ReLU that is the only reader of a linear, directly or through one view."""
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
    """A call that gives a weight in oneDNN's own layout; only oneDNN's calls may take it."""
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
        how = (w, padding, stride, dilation, groups, sizes)
        weight = _packed(gm, n, mkldnn._reorder_convolution_weight.default, how)
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
    _swallow(n, last, new)
    return 1


def _swallow(first: Node, last: Node, new: Node) -> None:
    """Replace the pair first, last (or the single node) by `new`; `last` is the only user of `first`."""
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
    """A residual addition of an equally laid out tensor that is known before the convolution."""
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
    """Whether `n` is a value of its own, materialised by a library call, that nobody reads after `last`."""
    if n.op != "call_function" or n.target not in _OWNING:
        return False
    order = {m: k for k, m in enumerate(n.graph.nodes)}
    return all(order[u] <= order[last] and not is_view(u) for u in n.users) and not feeds_output(n)


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
        # in place where nobody reads the addend any more: oneDNN then accumulates into it instead of copying it
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
