"""Pad matrix products with zeros to sizes that the library computes fast, and slice the result.

cuBLAS has fast kernels only for rows that take a multiple of 16 bytes in memory. Others, such as rows of a vocabulary
of 50257, take several times as long. Zeros along the summed dimension do not change the result. Along the others they
add rows or columns, which a view cuts off. `padding_cost.py` says which products gain. A matrix and its transpose share
one padded copy, and with freezing the copies of weights are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ..aten.pointwise import is_elementwise
from ..aten.reduction import is_normalisation, is_reduction
from ..aten.view import is_view
from .context import Context
from .graph import aten, function_of, insert, is_call, propagate, val
from .padding_cost import Padding, Sizes, alignment, missing, rate_of, work_of

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_ADDING = (aten.addmm.default, aten.baddbmm.default)


def run(gm: GraphModule, ctx: Context) -> int:
    """Pad the products of an inference graph that gain from it."""
    constant = ctx.constant_nodes(gm)
    return pad(gm, constant, constant if ctx.freezes else frozenset())


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Pad the products of a joint graph, forward and backward, that gain from it."""
    return pad(gm)


def pad(gm: GraphModule, constant: set[Node] | None = None, free: set[Node] | frozenset[Node] = frozenset()) -> int:
    """Pad the products that gain; return their number.

    Every dimension that is contiguous in an operand or in the result is padded. Copies of the nodes `constant` join
    them; copying the nodes `free` costs nothing.
    """
    padded = _Copies(gm, constant if constant is not None else set())
    slices = []
    for n in [n for n in gm.graph.nodes if is_call(n, *_PRODUCTS)]:
        sizes = _sizes(n)
        if sizes is not None and (more := _missing(n, sizes)) is not None and _pays(n, sizes, more, padded, free):
            slices.append(_pad_all(gm, n, more, padded))
    propagate(gm, slices)
    return len(slices)


def _operands(n: Node) -> tuple[Node, Node, Node | None]:
    """Return (a, b, bias) of a product."""
    if n.target in _ADDING:
        bias, a, b = n.args[:3]
    else:
        (a, b), bias = n.args[:2], None
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    assert bias is None or isinstance(bias, Node)
    return a, b, bias


def _sizes(n: Node) -> Sizes | None:
    """Return the sizes of a product of static sizes and one dtype, or None."""
    a, b, bias = _operands(n)
    sizes = (*val(a).shape, val(b).shape[-1])
    if not all(isinstance(s, int) for s in sizes) or {val(a).dtype, val(b).dtype} != {val(n).dtype}:
        return None
    if set(n.kwargs) - {"alpha", "beta"} or (bias is not None and val(bias).dtype != val(n).dtype):
        return None
    return sizes[-3], sizes[-2], sizes[-1]


def _missing(n: Node, sizes: Sizes) -> Sizes | None:
    """Return the padding of rows, depth and width of a product, in elements; None if nothing is missing."""
    a, _, _ = _operands(n)
    rows, depth, width = sizes
    itemsize = val(n).dtype.itemsize
    transposed = val(a).stride(-2) == 1 and val(a).stride(-1) != 1
    more = (missing(rows, itemsize) if transposed else 0, missing(depth, itemsize), missing(width, itemsize))
    return more if any(more) and 0 not in sizes else None


def _pays(n: Node, sizes: Sizes, more: Sizes, padded: _Copies, free: set[Node] | frozenset[Node]) -> bool:
    rate, itemsize = rate_of(val(n).dtype), val(n).dtype.itemsize
    if rate is None:
        return False
    batch = val(n).shape[0] if val(n).dim() == 3 else 1
    (rows, depth, width), (r, d, w) = sizes, more
    a, b, bias = _operands(n)
    needed = [x for x, m in ((a, r + d), (b, d + w)) if m and x not in free and not padded.has(x, more, x is a)]
    copies = [x for x in needed if not _in_kernel(x)]
    copied = [val(x).numel() for x in copies]
    if bias is not None and w and bias not in free:
        copied.append(val(bias).numel())
    if (r or w) and not _sliced_for_free(n):
        copied.append(val(n).numel())
    unaligned = min(alignment(s, itemsize) for s, m in zip(sizes, more, strict=True) if m)
    work, wide = (work_of(batch, s, itemsize) for s in (sizes, (rows + r, depth + d, width + w)))
    return Padding(rate, unaligned, work, wide, sum(copied) * itemsize, len(copied)).pays()


def _in_kernel(x: Node) -> bool:
    """Return whether a generated kernel computes a matrix, and so pads it where it stores it."""
    source = _source(x)[0]
    while is_view(source) and isinstance(source.args[0], Node):
        source = source.args[0]
    return source.op == "call_function" and is_elementwise(source.target)


def _sliced_for_free(n: Node) -> bool:
    """Return whether only generated kernels read a result, which take any strides."""
    return all(takes_strides(u) or (is_view(u) and _sliced_for_free(u)) for u in n.users)


def takes_strides(u: Node) -> bool:
    """Return whether a generated kernel computes a node, and so reads operands of any strides."""
    return is_elementwise(u.target) or is_reduction(u.target) or is_normalisation(u.target)


def _pad_all(gm: GraphModule, n: Node, more: Sizes, padded: _Copies) -> Node:
    """Replace a product by a slice of a padded one; return the slice."""
    a, b, bias = _operands(n)
    rows, depth, width = more
    operands: tuple[Node, ...] = (padded.of(a, rows, depth), padded.of(b, depth, width))
    if bias is not None:
        operands = (_wide_bias(gm, n, bias, more, padded), *operands)
    sliced = insert(gm.graph, n, function_of(n), operands, dict(n.kwargs))
    for dim, extra in ((-2, rows), (-1, width)):
        if extra:
            sliced = insert(gm.graph, n, aten.slice.Tensor, (sliced, val(n).dim() + dim, 0, val(n).shape[dim]))
    n.replace_all_uses_with(sliced)
    gm.graph.erase_node(n)
    return sliced


def _wide_bias(gm: GraphModule, n: Node, bias: Node, more: Sizes, padded: _Copies) -> Node:
    """Return a bias for the padded result; dimensions of size 1 are broadcast and stay."""
    fake = val(bias)
    rows = more[0] if fake.dim() > 1 and fake.shape[-2] != 1 else 0
    width = more[2] if fake.shape[-1] != 1 else 0
    if not rows and not width:
        return bias
    wide = insert(gm.graph, n, aten.constant_pad_nd.default, (bias, [0, width, 0, rows] if rows else [0, width]))
    padded.derived(wide, bias)
    return wide


@dataclass
class _Copies:
    """The padded copies of operands, by their source and the padding."""

    gm: GraphModule
    constant: set[Node]
    by_padding: dict[tuple[Node, int, int], Node] = field(default_factory=dict)

    def has(self, x: Node, more: Sizes, is_first: bool) -> bool:
        """Return whether an operand has been padded for another product."""
        rows, columns = more[:2] if is_first else more[1:]
        source, turned = _source(x)
        return (source, *((columns, rows) if turned else (rows, columns))) in self.by_padding

    def of(self, x: Node, rows: int, columns: int) -> Node:
        """Return `x` with zero rows and columns added."""
        if not rows and not columns:
            return x
        source, turned = _source(x)
        if turned:
            return self._new(_following(x), aten.transpose.int, (self.of(source, columns, rows), -2, -1), x)
        if (x, rows, columns) not in self.by_padding:
            args = (x, [0, columns, 0, rows])
            self.by_padding[x, rows, columns] = self._new(_following(x), aten.constant_pad_nd.default, args, x)
        return self.by_padding[x, rows, columns]

    def _new(self, before: Node, target: Callable[..., object], args: tuple[Argument, ...], source: Node) -> Node:
        new = insert(self.gm.graph, before, target, args)
        self.derived(new, source)
        return new

    def derived(self, new: Node, source: Node) -> None:
        """Note that a node is constant if its source is."""
        if source in self.constant:
            self.constant.add(new)


def _source(x: Node) -> tuple[Node, bool]:
    """Return the matrices of which `x` is the transpose, and True; else `x` and False."""
    source = x.args[0] if is_call(x, *_TRANSPOSES) else None
    if not isinstance(source, Node):
        return x, False
    rank = val(x).dim()
    order = list(range(rank))
    match x.target:
        case aten.permute.default:
            order = [int(k) % rank for k in x.args[1]]  # type: ignore[arg-type, union-attr]
        case aten.transpose.int:
            first, second = (int(k) % rank for k in x.args[1:3])  # type: ignore[arg-type]
            order[first], order[second] = second, first
        case _:
            order.reverse()
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return (source, True) if rank >= 2 and order == swapped else (x, False)


def _following(x: Node) -> Node:
    """Return the first node after `x` that is not an input."""
    after = x.next
    while after.op == "placeholder":
        after = after.next
    return after
