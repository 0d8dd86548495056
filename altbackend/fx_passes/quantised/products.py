"""Matrix products of dequantised bytes as products of integers.

    sum_k (a[i,k] - za) sa * (b[j,k] - zb[j]) sb[j]
        = sa sb[j] (sum_k a b  -  za sum_k b[j,k]  -  zb[j] (sum_k a[i,k] - K za))

The library adds the products of bytes exactly in 32 bits. The rest is arithmetic on its result, which one kernel does
together with bias, activation and the next quantisation. The sums of a constant weight are a constant. Eager's product
of floats rounds every term, so results differ from eager's by the rounding error of such a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ...compat.torch_api import exact_byte_products, multiplies_unsigned_bytes
from ...debug.trace import DecisionKind
from ..context import Context
from ..graph import aten, function_of, insert, is_call, replace, val
from .forms import Dequantised, Parameter, below_views, dequantised

# A term is at most 255 * 255 in size, so the sum of so many is below 2^31.
DEEPEST = 1 << 15
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHIFT = 128  # a uint8 minus this is an int8, for libraries without products of uint8


@dataclass(frozen=True)
class Product:
    """A product `rows @ weight.T (+ bias)` of dequantised matrices. `x`: the rows; `views` make a matrix of them."""

    call: Node
    x: Dequantised
    views: list[Node]
    weight: Dequantised
    bias: Node | None


def run(gm: GraphModule, ctx: Context) -> int:
    """Compute products of dequantised bytes from products of integers; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.mm.default, aten.addmm.default):
            continue
        product = product_of(n)
        if product is None:
            continue
        reason = _refusal(product, ctx.device)
        if reason:
            ctx.trace.decision(DecisionKind.QUANTISED, n.name, "left as floats", reason)
            continue
        ctx.trace.decision(DecisionKind.QUANTISED, n.name, "product of integers", "both operands are bytes")
        _rewrite(gm, product)
        count += 1
    return count


def product_of(n: Node) -> Product | None:
    """Return the parts of a call of `mm` or `addmm` whose operands are dequantised, or None."""
    bias, x, wt = (None, *n.args) if n.target is aten.mm.default else n.args[:3]
    if n.kwargs or not is_transposed(wt) or not isinstance(wt, Node):
        return None
    source, views = below_views(x)
    rows, weight = dequantised(source), dequantised(wt.args[0])
    if rows is None or weight is None or not (bias is None or isinstance(bias, Node)):
        return None
    return Product(n, rows, views, weight, bias)


def is_transposed(n: object) -> bool:
    """Return whether a node swaps the dimensions of a matrix."""
    source = val(n.args[0]) if isinstance(n, Node) and n.args else None
    if not isinstance(n, Node) or not isinstance(source, torch.Tensor) or source.dim() != 2:
        return False
    arguments: tuple[Any, ...] = n.args[1:]
    if is_call(n, aten.t.default):
        return True
    if is_call(n, aten.permute.default):
        return list(arguments[0]) == [1, 0]
    return is_call(n, aten.transpose.int) and {d % 2 for d in arguments} == {0, 1}


def _refusal(p: Product, device: str) -> str:
    """Return why a product stays one of floats, or ""."""
    x, w, out = val(p.x.integers), val(p.weight.integers), val(p.call)
    if not is_of_rows(p.weight) or (p.x.axis is not None and not p.x.per_row):
        return "a scale varies along the summed dimension"
    if w.dtype != torch.int8:
        return f"a weight of {w.dtype}: the library multiplies int8"
    if out.dtype not in _FLOATS:
        return f"a result of {out.dtype}"
    if p.bias is not None and (val(p.bias).dim() != 1 or val(p.bias).shape[0] != w.shape[0]):
        return "a bias that is no vector"
    if not isinstance(w.shape[1], int) or not 0 < w.shape[1] <= DEEPEST or not isinstance(w.shape[0], int):
        return f"sums of {w.shape[1]} terms: 32 bits hold {DEEPEST}"
    if any(isinstance(s, Node) and not val(s).dtype.is_floating_point for s in (p.x.scale, p.weight.scale)):
        return "a scale that is no float"
    if any(not is_whole(d) for d in (p.x, p.weight)):
        return "a zero point that may be no byte"
    if device == "gpu":
        rows = out.shape[0]
        if not isinstance(rows, int) or rows <= 16 or w.shape[0] % 8 or w.shape[1] % 8:
            return "the library takes more than 16 rows, and depths and widths that are multiples of 8"
        return ""
    if x.device.type != "cpu" or not exact_byte_products():
        return "this processor's products of bytes are not exact"
    return ""


def is_of_rows(d: Dequantised) -> bool:
    """Return whether scale and zero point of a weight are single numbers, or one for each output channel."""
    return d.axis in (None, 0) and not (d.per_row and d.axis is None)


def is_whole(d: Dequantised) -> bool:
    """Return whether the zero point is a whole number, and as large as a byte where it is known."""
    if isinstance(d.zero, Node):
        return not val(d.zero).dtype.is_floating_point
    limits = torch.iinfo(val(d.integers).dtype)
    return d.zero is None or (d.zero == int(d.zero) and limits.min <= d.zero <= limits.max)


class _Builder:
    """Inserts calls before a node."""

    def __init__(self, gm: GraphModule, before: Node) -> None:
        self.gm, self.before = gm, before

    def __call__(self, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return insert(self.gm.graph, self.before, target, args, kwargs)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if val(x).dtype == dtype else self(aten._to_copy.default, x, dtype=dtype)


def _rewrite(gm: GraphModule, p: Product) -> None:
    call = _Builder(gm, p.call)
    w = p.weight.integers
    depth = val(w).shape[1]
    q = p.x.integers
    for view in reversed(p.views):
        q = call(function_of(view), q, *view.args[1:])
    unsigned = val(q).dtype == torch.uint8
    shift = SHIFT if unsigned and (val(q).device.type != "cpu" or not multiplies_unsigned_bytes()) else 0
    if shift:
        q = call.cast(call(aten.sub.Tensor, call.cast(q, torch.int16), shift), torch.int8)
    total = call(aten._int_mm.default, q, call(aten.permute.default, w, [1, 0]))
    zero = _moved_zero(call, p.x, shift)
    if isinstance(zero, Node) or zero != 0:
        sums = call(aten.sum.dim_IntList, w, [1], dtype=torch.int32)
        total = call(aten.sub.Tensor, total, call(aten.mul.Tensor, sums, zero))
    if not p.weight.has_no_zero:
        terms = call(aten.sum.dim_IntList, q, [1], True, dtype=torch.int32)
        moved = call(aten.mul.Tensor, zero, depth) if isinstance(zero, Node) else depth * int(zero)
        terms = call(aten.sub.Tensor, terms, moved)
        total = call(aten.sub.Tensor, total, call(aten.mul.Tensor, terms, _whole(call, p.weight.zero)))
    scaled = call.cast(total, torch.float32)
    scale: Argument = _scale(call, p.weight, of_rows=False)
    of_rows = _scale(call, p.x, of_rows=True)
    if not p.x.per_row:  # numbers of columns: computed once where they are constants
        scaled = call(aten.mul.Tensor, scaled, _times(call, scale, of_rows))
    else:
        scaled = call(aten.mul.Tensor, call(aten.mul.Tensor, scaled, of_rows), scale)
    if p.bias is not None:
        scaled = call(aten.add.Tensor, scaled, call.cast(p.bias, torch.float32))
    replace(p.call, call.cast(scaled, val(p.call).dtype))


def _times(call: _Builder, a: Argument, b: Argument) -> Argument:
    if isinstance(a, Node):
        return call(aten.mul.Tensor, a, b)
    return call(aten.mul.Tensor, b, a) if isinstance(b, Node) else float(a) * float(b)  # type: ignore[arg-type]


def _whole(call: _Builder, zero: Parameter | None) -> Node | int:
    """Return a zero point: a number, or a tensor of int64, in which products with it cannot overflow."""
    if not isinstance(zero, Node):
        return int(zero or 0)
    zero = call.cast(zero, torch.int64)
    return zero if val(zero).dim() <= 1 else call(aten.reshape.default, zero, [-1])


def _moved_zero(call: _Builder, x: Dequantised, shift: int) -> Node | int:
    """Return the zero point of rows from whose integers `shift` was subtracted: a number, (1,) or (rows, 1)."""
    zero = _whole(call, x.zero)
    if not isinstance(zero, Node):
        return zero - shift
    if x.per_row:
        zero = call(aten.reshape.default, zero, [-1, 1])
    return call(aten.sub.Tensor, zero, shift) if shift else zero


def _scale(call: _Builder, d: Dequantised, of_rows: bool) -> Argument:
    """Return a scale in float32: a number, a vector of columns, or a column (rows, 1)."""
    if not isinstance(d.scale, Node):
        return float(d.scale)
    scale = call.cast(d.scale, torch.float32)
    if of_rows and d.per_row:
        return scale if val(scale).dim() == 2 else call(aten.reshape.default, scale, [-1, 1])
    return call(aten.reshape.default, scale, [-1]) if val(scale).dim() > 1 else scale
