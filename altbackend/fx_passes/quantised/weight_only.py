"""Products of floats with weights that are stored in bytes, where reading the weight takes the time.

    CPU:  x @ float(w).T * s  ->  _weight_int8pack_mm(x, w, s)
    GPU:  x @ d(w).T          ->  sum_k x[i, k] d(w[j, k]), in one kernel that reads the bytes

Both are for few rows. With more rows, one kernel writes the floats and the library multiplies them. A dequantised
weight is never kept: it would take more memory than the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ...compat.torch_api import fast_byte_weights
from ...debug.trace import DecisionKind
from ..context import Context
from ..graph import ancestors, aten, insert, is_call, only_user, replace, val
from .forms import VIEWS, below_views, dequantised
from .products import is_of_rows, is_transposed

# Rows up to which the library's product of bfloat16 with bytes is faster than a dequantised weight: with a matrix of
# 1,024 x 1,024 and one thread of AVX-512, 54 us for one row and 25 for each further one, against 245 and 8. Its loops
# for other dtypes are 4 to 100 times slower than a dequantised weight.
MOST_ROWS = 8
# A GPU reads a byte of the weight for each term. The library would read 2 bytes that another kernel has written from
# one: five times the traffic. On an H100, a bfloat16 product with 8,192 x 8,192 takes 122 us dequantised; one kernel
# takes 27, 32 and 41 for one row of int8, groups of 4 bits and float8, and as much again for each further row. With
# 4,096 x 4,096, two rows take 17 to 26 us against 28, four rows 29 to 47.
MOST_ROWS_ON_GPU = 2
LARGEST_ALONE = 1 << 16  # elements of a weight below which starting kernels takes the time
_LOW = (torch.bfloat16, torch.float16)
_NARROW = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Weight:
    """A weight (out, in) of int8 and its scale, None for 1: a number, or a tensor of one element or of each row."""

    integers: Node
    scale: Node | float | None


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite products of few rows with weights of bytes; return their number."""
    rewrite = _on_gpu if ctx.device == "gpu" else _on_cpu
    products = [n for n in gm.graph.nodes if is_call(n, aten.mm.default, aten.addmm.default) and not n.kwargs]
    count = 0
    for n in products:
        verdict = rewrite(gm, n)
        if verdict is not None:
            reason, done = verdict
            kind = "bytes read by the product" if done else "dequantised by a kernel"
            ctx.trace.decision(DecisionKind.QUANTISED, n.name, kind, reason)
            count += done
    return count


def _operands(n: Node) -> tuple[object, object, object]:
    """Return (bias or None, rows, transposed weight) of a product."""
    bias, x, wt = (None, *n.args) if n.target is aten.mm.default else n.args[:3]
    return bias, x, wt


def _rows(x: Node) -> int | None:
    rows = val(x).shape[0]
    return rows if isinstance(rows, int) else None


Verdict = tuple[str, bool]  # a reason, and whether the product was rewritten


# --- CPU -------------------------------------------------------------------------------------------------------------


def _on_cpu(gm: GraphModule, n: Node) -> Verdict | None:
    bias, x, wt = _operands(n)
    weight = _weight_of(wt)
    if weight is None or not isinstance(x, Node):
        return None
    rows = _rows(x)
    if val(x).dtype != torch.bfloat16 or not fast_byte_weights():
        return f"the library has no fast product of {val(x).dtype} with bytes on this processor", False
    if rows is None or not 0 < rows <= MOST_ROWS:
        return f"{rows} rows, and the library's product of bytes gains up to {MOST_ROWS}", False
    if bias is not None and (not isinstance(bias, Node) or val(bias).dim() != 1):
        return "a bias that is no vector", False
    out, depth = val(weight.integers).shape
    if not isinstance(depth, int) or depth % 32 or not isinstance(out, int) or out % 32:
        return f"sizes {out} and {depth}, of which the library takes multiples of 32", False

    def call(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return insert(gm.graph, n, target, args, kwargs)

    later = None if weight.scale is not None or bias is not None else _scaled_later(n, out)
    if later is not None:
        scale = later.args[1] if below(later.args[0]) is n else later.args[0]
        move_before(n, scale)
    else:
        scale = _vector(call, weight.scale, out, val(x).device)
    assert isinstance(scale, Node)
    new = call(aten._weight_int8pack_mm.default, x, weight.integers, scale)
    if bias is not None:
        assert isinstance(bias, Node)
        new = call(aten.add.Tensor, new, bias)
    if later is not None:
        product = later.args[0] if below(later.args[0]) is n else later.args[1]
        assert isinstance(product, Node)
        replace(later, product)
    replace(n, new)
    return f"{rows} rows: reading the weight takes the time", True


def below(n: object) -> object:
    """Return the node below a chain of reshapes."""
    return below_views(n)[0]


def move_before(n: Node, operand: object) -> None:
    """Move the calls that `operand` needs before `n`, in order. None of them depends on `n`."""
    needed, stack = set[Node](), [operand]
    while stack:
        m = stack.pop()
        if isinstance(m, Node) and m.op == "call_function" and m not in needed:
            needed.add(m)
            stack.extend(m.all_input_nodes)
    for m in [m for m in n.graph.nodes if m in needed]:
        if m > n:
            n.prepend(m)


def _weight_of(wt: object) -> Weight | None:
    """Return the weight of bytes whose transpose, as floats, an operand is; None for other operands."""
    if is_call(wt, aten._to_copy.default) and isinstance(wt, Node) and is_transposed(wt.args[0]):
        inner = wt.args[0]
        assert isinstance(inner, Node)
        q = inner.args[0]
        return Weight(q, None) if isinstance(q, Node) and _is_weight(q) else None
    if not is_transposed(wt) or not isinstance(wt, Node):
        return None
    source = wt.args[0]
    if is_call(source, aten._to_copy.default) and isinstance(source, Node):
        q = source.args[0]
        if isinstance(q, Node) and _is_weight(q):
            return Weight(q, None)
    d = dequantised(source)
    if d is None or not d.has_no_zero or not is_of_rows(d) or not _is_weight(d.integers):
        return None
    return Weight(d.integers, d.scale)


def _is_weight(q: Node) -> bool:
    fake: torch.Tensor = val(q)
    return fake.dtype == torch.int8 and fake.dim() == 2 and fake.is_contiguous()


def _scaled_later(n: Node, out: int) -> Node | None:
    """Return the multiplication by a vector of columns that alone reads a product, through reshapes of its rows."""
    user = only_user(n)
    while user is not None and is_call(user, *VIEWS) and val(user).shape[-1] == out:
        user = only_user(user)
    if user is None or not is_call(user, aten.mul.Tensor) or user.kwargs or val(user).dtype != val(n).dtype:
        return None
    others = [a for a in user.args if below(a) is not n]
    if len(others) != 1 or not isinstance(others[0], Node) or tuple(val(others[0]).shape) != (out,):
        return None
    if n in ancestors(others[0]):
        return None
    product = next(a for a in user.args if a is not others[0])
    same = isinstance(product, Node) and tuple(val(product).shape) == tuple(val(user).shape)
    return user if same and val(others[0]).dtype == val(n).dtype else None


def _vector(call: Callable[..., Node], scale: Node | float | None, out: int, device: torch.device) -> Node:
    """Return a scale as a bfloat16 vector of output channels."""
    if not isinstance(scale, Node):
        number = 1.0 if scale is None else scale
        return call(aten.full.default, [out], number, dtype=torch.bfloat16, device=device)
    if val(scale).dtype != torch.bfloat16:
        scale = call(aten._to_copy.default, scale, dtype=torch.bfloat16)
    if val(scale).numel() == out:
        return call(aten.reshape.default, scale, [out])
    wide = call(aten.expand.default, call(aten.reshape.default, scale, [1]), [out])
    return call(aten.clone.default, wide, memory_format=torch.contiguous_format)


# --- GPU -------------------------------------------------------------------------------------------------------------


def _on_gpu(gm: GraphModule, n: Node) -> Verdict | None:
    bias, x, wt = _operands(n)
    if not isinstance(x, Node) or not isinstance(wt, Node) or not _reads_bytes(wt):
        return None
    rows = _rows(x)
    if val(x).dtype not in (*_LOW, torch.float32) or val(wt).dtype != val(x).dtype:
        return f"a product of {val(x).dtype}", False
    if rows is None or not 0 < rows <= MOST_ROWS_ON_GPU:
        return (
            f"{rows} rows: beyond {MOST_ROWS_ON_GPU}, the library's products gain",
            False,
        )
    if not isinstance(val(wt).numel(), int) or val(wt).numel() < LARGEST_ALONE:
        return "a small weight", False

    def call(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return insert(gm.graph, n, target, args, kwargs)

    def wide(a: Node) -> Node:
        return a if val(a).dtype == torch.float32 else call(aten._to_copy.default, a, dtype=torch.float32)

    columns = wide(call(aten.permute.default, wt, [1, 0]))
    terms = call(aten.mul.Tensor, call(aten.unsqueeze.default, wide(x), 1), call(aten.unsqueeze.default, columns, 0))
    new = call(aten.sum.dim_IntList, terms, [-1])
    if bias is not None:
        assert isinstance(bias, Node)
        new = call(aten.add.Tensor, new, wide(bias))
    if val(new).dtype != val(n).dtype:
        new = call(aten._to_copy.default, new, dtype=val(n).dtype)
    replace(n, new)
    return f"{rows} rows: reading the weight takes the time", True


_POINTWISE = (aten._to_copy.default, aten.mul.Tensor, aten.sub.Tensor)
_MOVES = (aten.t.default, aten.permute.default, aten.transpose.int, *VIEWS)


def _reads_bytes(n: Node) -> bool:
    """Return whether a matrix is a dequantisation, which nothing else reads, of a tensor of as many bytes."""
    size = val(n).numel()
    while n.op == "call_function" and only_user(n) is not None:
        moves = is_call(n, *_POINTWISE, *_MOVES) or dequantised(n) is not None
        sources = [a for a in n.all_input_nodes if isinstance(val(a), torch.Tensor) and val(a).numel() == size]
        if not moves or len(sources) != 1:
            return False
        (n,) = sources
        if val(n).dtype in _NARROW:
            return True
    return False
