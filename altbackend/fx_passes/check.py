"""Run a graph before and after a pass on example inputs and compare the results (option `check_passes`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from ..aten.random import is_random
from ..compat import torch_api
from ..debug.trace import DecisionKind
from ..errors import PassChangedResults
from .context import Context
from .graph import snapshot

# The largest relative difference, by the norm, between two orders of the same operations.
ROUNDING: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_SEED = 2147483647


@contextlib.contextmanager
def compared(gm: GraphModule, ctx: Context, name: str, draws: bool) -> Iterator[None]:
    """Raise PassChangedResults if the body, which is the pass `name`, changes results beyond rounding.

    `draws`: the pass may change which random numbers are drawn; it is then not checked on graphs that draw some.
    """
    if not ctx.config.check_passes:
        yield
        return
    old_text, old = str(gm.graph), snapshot(gm.graph)
    yield
    if str(gm.graph) == old_text:
        return
    before = old()
    if draws and any(is_random(n.target) for n in before.nodes):
        ctx.trace.decision(DecisionKind.CHECKS, f"pass {name}", "not checked", "it may draw other random numbers")
        return
    reason = _difference(gm, before, ctx, name)
    if reason:
        raise PassChangedResults(name, ctx.trace.graph_name, reason)


def _difference(gm: GraphModule, before: Graph, ctx: Context, name: str) -> str:
    """Return how the results of two graphs differ on example inputs, or ""."""
    with torch_api.real_tensors(), torch.no_grad():
        try:
            inputs = [example(n) for n in before.find_nodes(op="placeholder")]
            want = _run(GraphModule(gm, before), inputs)
        except Exception as cause:  # the examples may be wrong for this graph, for example as indices
            ctx.trace.decision(DecisionKind.CHECKS, f"pass {name}", "not checked", f"{type(cause).__name__}: {cause}")
            return ""
        try:
            got = _run(GraphModule(gm, snapshot(gm.graph)()), inputs)
        except Exception as cause:
            return f"the graph fails after it: {type(cause).__name__}: {cause}"
        reason = differences(got, want)
    ctx.trace.decision(DecisionKind.CHECKS, f"pass {name}", "differs" if reason else "checked", reason or "equal")
    return reason


def example(n: Node) -> object:
    """Return an example of an input: normal numbers, or integers of 0 and 1, which most indices may be."""
    value = n.meta["example_value"] if "example_value" in n.meta else n.meta["val"]
    if not isinstance(value, torch.Tensor):
        return _traced(value)
    sizes, strides = [_number(s) for s in value.shape], [_number(s) for s in value.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    seed = torch.Generator().manual_seed(_SEED + len(n.name))
    if value.dtype.is_floating_point or value.dtype.is_complex:
        kind = value.dtype if value.dtype.is_complex else torch.float32
        data = torch.randn(extent, generator=seed, dtype=kind).to(value.dtype)
    else:
        data = torch.randint(0, 2, (extent,), generator=seed).to(value.dtype)
    return data.to(value.device).as_strided(sizes, strides)


def _number(size: int | torch.SymInt) -> int:
    number = _traced(size)
    assert isinstance(number, int), f"the size {size} had no number in the trace"
    return number


def _traced(x: object) -> object:
    """Return the number that a symbolic one had when the graph was traced."""
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x.node.hint
    return x


def _run(gm: GraphModule, inputs: Sequence[object]) -> list[object]:
    """Return the results of a graph, and its inputs afterwards, since it may write to them."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        results = Interpreter(gm).run(*copies)
    return [*pytree.tree_leaves(results), *copies]


def differences(got: Sequence[object], want: Sequence[object]) -> str:
    """Return the first difference between results that is beyond rounding, or ""."""
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        reason = _of_values(a, b)
        if reason:
            return f"result {k}: {reason}"
    return ""


def _of_values(a: object, b: object) -> str:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return "" if type(a) is type(b) and a == b else f"{a!r} instead of {b!r}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    if b.dtype not in ROUNDING:
        wrong = int((a != b).sum())
        return f"{wrong} of {b.numel()} elements differ" if wrong else ""
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(0.5), b[~finite].nan_to_num(0.5)) or not bool(a[finite].isfinite().all()):
        return "other elements are not finite"
    x, y = (t[finite].to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    far, size = float((x - y).norm()), float(y.norm())
    limit = ROUNDING[b.dtype]
    return f"relative difference {far / (size or 1):.3g}, more than {limit:g}" if far > limit * size else ""
